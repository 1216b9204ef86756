"""The command `mgrpo` in processes of their own, forked from one that has imported everything: 0.1 s instead of 8 s.

Each is a real process: it has its own exit code, its own output, and can be killed as the system kills.
"""

import asyncio
import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROCESSES = multiprocessing.get_context("forkserver")
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Trap:
    """Something that goes wrong inside the program.

    Attributes:
        at: function or Prefect task, `module:attribute` as its caller finds it.
        on: "entry" or "exit".
        call: at which of its calls, from 1; a note is made of every call.
        action: "kill" (SIGKILL of itself), "raise" (RuntimeError), "note" (a line in `file`), "hang" (a note, and then
            an async function waits for minutes), or `module:function`, which gets the call's arguments.
        file: for the notes.
    """

    at: str
    on: str = "entry"
    call: int = 1
    action: str = "kill"
    file: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. `code` is negative for a signal."""

    code: int
    out: str
    err: str


@dataclass(slots=True)
class Program:
    """Starts `mgrpo` with arguments. `api` is the Prefect server's URL; output goes to files below `folder`."""

    api: str
    folder: Path
    _count: int = field(default=0)

    def run(self, *arguments: object, traps: Sequence[Trap] = ()) -> Ended:
        """Run to the end.

        Args:
            arguments: of the command line.
            traps: what goes wrong on the way.
        """
        return self.start(*arguments, traps=traps).wait()

    def start(self, *arguments: object, traps: Sequence[Trap] = ()) -> "Running":
        """Start, and return at once."""
        self._count += 1
        output = self.folder / f"process-{self._count}"
        process = _PROCESSES.Process(
            target=_main, args=(self.api, [str(one) for one in arguments], str(output), list(traps))
        )
        process.start()
        return Running(process, output)


@dataclass(frozen=True, slots=True)
class Running:
    """A process under way."""

    process: Any
    output: Path

    def wait(self, seconds: float = _DEADLINE_S) -> Ended:
        """Raises: TimeoutError, after killing it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {seconds} s: {self._text('err')[-2000:]}")
        ended = Ended(self.process.exitcode, self._text("out"), self._text("err"))
        self.process.close()
        return ended

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def _text(self, stream: str) -> str:
        path = self.output.with_suffix(f".{stream}")
        return path.read_text(encoding="utf-8") if path.exists() else ""


def preload() -> None:
    """Start the process that the others are forked from. Its imports are theirs."""
    _PROCESSES.set_forkserver_preload(
        [
            "flows.cli",
            "flows.train_run",
            "flows.compute_iteration",
            "flows.evaluation",
            "matplotlib.backends.backend_agg",
            "matplotlib.pyplot",
            "mlflow.store.tracking.sqlalchemy_store",
            "transformers.models.qwen3.modeling_qwen3",
            "tests.flows.program",
        ]
    )


def _main(api: str, arguments: list[str], output: str, traps: list[Trap]) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_LEVEL, temporary_settings

    from flows.cli import app

    for trap in traps:
        _set(trap)
    with temporary_settings({PREFECT_API_URL: api, PREFECT_LOGGING_LEVEL: "WARNING"}):
        app(arguments, prog_name="mgrpo")


def _set(trap: Trap) -> None:
    from prefect import Task

    module, _, attribute = trap.at.partition(":")
    owner = importlib.import_module(module)
    there = getattr(owner, attribute)
    if isinstance(there, Task):
        there.fn = _trapped(there.fn, trap)
    else:
        setattr(owner, attribute, _trapped(there, trap))


def _trapped(body: Callable[..., Any], trap: Trap) -> Callable[..., Any]:
    """`body`, with the trap at its entry or exit; async if it is."""
    times = {"entry": itertools.count(1), "exit": itertools.count(1)}

    def springs(on: str) -> bool:
        now = next(times[on])  # in one step: updates run in threads
        return on == trap.on and (now == trap.call or trap.action == "note")

    if asyncio.iscoroutinefunction(body):

        @functools.wraps(body)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            if springs("entry"):
                _act(trap, args)
                await asyncio.sleep(_DEADLINE_S if trap.action == "hang" else 0)
            result = await body(*args, **kwargs)
            if springs("exit"):
                _act(trap, args)
            return result

        return waiting

    @functools.wraps(body)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if springs("entry"):
            _act(trap, args)
        result = body(*args, **kwargs)
        if springs("exit"):
            _act(trap, args)
        return result

    return plain


def _act(trap: Trap, args: tuple[Any, ...]) -> None:
    match trap.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError(f"trap at {trap.at}")
        case "note" | "hang":
            with Path(trap.file).open("a", encoding="utf-8") as file:
                file.write(f"{trap.at}\n")
        case function:
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(*args)
