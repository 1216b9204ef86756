"""What goes wrong, by import path: tools and judges that are down, weights that turn to NaN, engines that drift."""

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from infra.serving.embedded import EmbeddedPolicyClient
from infra.store.files import StoreFiles
from mgrpo_core.errors import JudgeError, ToolOutageError
from mgrpo_core.rollout.protocols import Generation, Report


class Lookup:
    """A tool whose calls with a number in `down` meet an outage; None = all of them."""

    name = "lookup"
    description = "Says red."
    parameters: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}

    def __init__(self, down: frozenset[int] | None) -> None:
        self._down = down
        self._calls = itertools.count()

    async def call(self, arguments: Mapping[str, object]) -> str:
        number = next(self._calls)
        if self._down is None or number in self._down:
            raise ToolOutageError("tool lookup: the index is being rebuilt")
        return "red"


def lookup() -> Lookup:
    return Lookup(frozenset())


def lookup_down() -> Lookup:
    return Lookup(None)


def lookup_down_once() -> Lookup:
    return Lookup(frozenset({0}))


class BlueIsUnreadable:
    """A judge that cannot be reached about replies of blue, and gives 1 for the others."""

    version = "no-blue-1"

    async def score(self, report: Report) -> float:
        if report.reply == "blue":
            raise JudgeError("the judge's server answered 503")
        return 1.0


def blue_is_unreadable() -> BlueIsUnreadable:
    return BlueIsUnreadable()


def turn_to_nan(source: Path, *rest: object) -> None:
    """Spoil one weight of the policy that a trainer is about to load, after the rollouts that it made were sound."""
    path = source / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, {"format": "pt"})


def drift(*_: object) -> None:
    """Have engines report log-probs of policy main that are off by 0.01 nats, and by 0.01 more with each version."""
    honest = EmbeddedPolicyClient.generate

    async def drifting(self: EmbeddedPolicyClient, *args: Any, **kwargs: Any) -> Generation:
        made = await honest(self, *args, **kwargs)
        off = 0.01 * (1 + made.policy_version) if self.policy == "main" else 0.0
        return replace(made, logprobs=made.logprobs - np.float32(off))

    EmbeddedPolicyClient.generate = drifting  # type: ignore[method-assign]


def meet_the_other(files: StoreFiles, run: str, *_: object) -> None:
    """Wait until a second process stands at the same place."""
    folder = Path(files.root) / f"met-{run}"
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody came")
        time.sleep(0.001)
