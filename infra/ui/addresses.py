"""Addresses of the pages: iteration, query and rollout in the path, what is shown of them behind the question mark."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

from infra.store.stored_iteration import StoredIteration
from infra.traces.filters import TraceFilter
from mgrpo_core.errors import ConfigError

View = Literal["dialogue", "logprob", "advantage", "mask"]
VIEWS: tuple[View, ...] = ("dialogue", "logprob", "advantage", "mask")

_ITERATION = re.compile(r"/iteration/([0-9]{1,9})")
_ROLLOUT = re.compile(r"/iteration/([0-9]{1,9})/query/([0-9]{1,9})/rollout/([0-9]{1,9})")
_COMPARE = re.compile(r"/iteration/([0-9]{1,9})/query/([0-9]{1,9})/compare/([0-9]{1,9})/([0-9]{1,9})")

OVERVIEW = "/"


@dataclass(frozen=True, slots=True)
class IterationPage:
    """The trajectories of an iteration."""

    iteration: int

    @property
    def path(self) -> str:
        return f"/iteration/{self.iteration}"


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """One attempt at the query at a position."""

    iteration: int
    position: int
    rollout: int

    @property
    def path(self) -> str:
        return f"/iteration/{self.iteration}/query/{self.position}/rollout/{self.rollout}"


@dataclass(frozen=True, slots=True)
class ComparePage:
    """Two attempts at a query, side by side."""

    iteration: int
    position: int
    left: int
    right: int

    @property
    def path(self) -> str:
        return f"/iteration/{self.iteration}/query/{self.position}/compare/{self.left}/{self.right}"


Page = IterationPage | RolloutPage | ComparePage


def page_of(path: str | None) -> Page | None:
    """The page at a path; None for the overview and for what is no page."""
    path = (path or "/").rstrip("/")
    for pattern, make in ((_COMPARE, ComparePage), (_ROLLOUT, RolloutPage), (_ITERATION, IterationPage)):
        if found := pattern.fullmatch(path):
            return make(*map(int, found.groups()))
    return None


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a rollout: which trajectory, how, and from which token on."""

    agent_path: str | None = None
    view: View = "dialogue"
    start: int = 0

    @property
    def search(self) -> str:
        words = {"at": self.agent_path, "view": self.view if self.view != "dialogue" else None, "from": self.start}
        return _search({name: value for name, value in words.items() if value})

    def but(self, **changes: Any) -> "Shown":
        return replace(self, **changes)


def shown_of(search: str | None) -> Shown:
    """Back from an address; what makes no sense is as if it were not there."""
    words = _words(search)
    views: dict[str, View] = {str(view): view for view in VIEWS}
    start = words.get("from", "")
    first = int(start) if start.isdecimal() and len(start) < 10 else 0
    return Shown(words.get("at"), views.get(words.get("view", ""), "dialogue"), first)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter as its form has it: text, "" where anything does."""

    agent: str = ""
    status: str = ""
    sign: str = ""
    query: str = ""
    rollout: str = ""
    low: str = ""
    high: str = ""
    text: str = ""

    @property
    def search(self) -> str:
        return _search({field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name)})

    def filter(self, stored: StoredIteration, query_ids: list[str]) -> TraceFilter:
        """Raises: ConfigError for a field that is no number where one is meant, or no query."""
        position = _number("query", self.query, int)
        if position is not None and not 0 <= position < len(query_ids):
            raise ConfigError(f"query {position}: the iteration has queries 0 to {len(query_ids) - 1}.")
        if self.agent and self.agent not in stored.config.agents:
            raise ConfigError(f"agent {self.agent!r}: the run has {', '.join(stored.config.agents)}.")
        return TraceFilter(
            agent=self.agent or None,
            status=self.status or None,
            sign=self.sign or None,  # type: ignore[arg-type]  # checked there
            query_id=None if position is None else query_ids[position],
            rollout_index=_number("rollout", self.rollout, int),
            min_reward=_number("reward from", self.low, float),
            max_reward=_number("reward to", self.high, float),
            text=self.text or None,
        )


def wanted_of(search: str | None) -> Wanted:
    """Back from an address; unknown words are left out."""
    words = _words(search)
    return Wanted(**{field.name: words[field.name] for field in fields(Wanted) if field.name in words})


def _number(name: str, text: str, kind: Any) -> Any:
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is no number. Give one, or leave it empty.") from None


def _words(search: str | None) -> dict[str, str]:
    try:
        return dict(parse_qsl((search or "").removeprefix("?"), max_num_fields=32))
    except ValueError:  # too many
        return {}


def _search(words: Mapping[str, Any]) -> str:
    return f"?{urlencode(words, errors='replace')}" if words else ""
