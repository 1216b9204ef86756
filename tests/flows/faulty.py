"""Tools and judges for configs, by import path: some of them down."""

import itertools
from collections.abc import Mapping

from mgrpo_core.errors import JudgeError, ToolOutageError
from mgrpo_core.rollout.protocols import Report


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
