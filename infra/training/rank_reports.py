"""What the ranks of an update tell the process that started them: small files in a folder, each whole or absent."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mgrpo_core import errors
from mgrpo_core.errors import InfrastructureError, MGRPOError

_FIGURES = "figures.json"


@dataclass(frozen=True, slots=True)
class RankReports:
    """Both sides of the folder: ranks write, their starter reads."""

    folder: Path

    def tell_progress(self, rank: int, done: int, total: int) -> None:
        """This rank's tokens done, and in all."""
        self._write(f"progress-{rank}.json", [done, total])

    def tell_figures(self, figures: dict[str, Any]) -> None:
        """The update's figures, equal on all ranks: one of them tells."""
        self._write(_FIGURES, figures)

    def tell_error(self, rank: int, policy: str, error: Exception) -> None:
        """Why this rank cannot go on."""
        self._write(f"error-{rank}.json", asdict(_described(rank, policy, error)))

    def tokens(self) -> tuple[int, int]:
        """Tokens done and in all, of the ranks that have begun."""
        parts = [json.loads(path.read_bytes()) for path in self.folder.glob("progress-*.json")]
        return sum(done for done, _ in parts), sum(total for _, total in parts)

    def figures(self) -> dict[str, Any] | None:
        """None until an update is done."""
        path = self.folder / _FIGURES
        return json.loads(path.read_bytes()) if path.exists() else None

    def error(self) -> "RankError | None":
        """The error to show: one that says what is wrong before one that may follow from it, and the first of those."""
        told = [RankError(**json.loads(path.read_bytes())) for path in self.folder.glob("error-*.json")]
        return min(told, key=lambda one: (not one.sure, one.at), default=None)

    def _write(self, name: str, content: object) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(self.folder / name)


@dataclass(frozen=True, slots=True)
class RankError:
    """What a rank told before it ended.

    Attributes:
        at: when, seconds since 1970.
        kind: name of the class in `mgrpo_core.errors` that it is raised as again.
        message: its message.
        sure: the rank knows what is wrong; else it may have failed because another is lost.
    """

    at: float
    kind: str
    message: str
    sure: bool

    def raised_again(self) -> MGRPOError:
        return getattr(errors, self.kind)(self.message)


def _described(rank: int, policy: str, error: Exception) -> RankError:
    if isinstance(error, MGRPOError):
        known = (one.__name__ for one in type(error).__mro__ if getattr(errors, one.__name__, None) is one)
        return RankError(time.time(), next(known), str(error), sure=True)
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out_of_memory:
        what = (
            f"is out of memory ({_first_line(error)}). Lower update.micro_batch_tokens, or raise "
            f"execution.update_processes.{policy}, so that each holds less."
        )
    else:
        what = f"failed with {type(error).__name__}: {error}"
    message = f"update of policy {policy!r}: rank {rank} {what}"
    return RankError(time.time(), InfrastructureError.__name__, message, sure=out_of_memory)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
