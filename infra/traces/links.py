"""Where to look at a trajectory: a command, and a page. Of numbers and checked names, so that it is safe to paste."""

import re
import shlex
from dataclasses import dataclass
from urllib.parse import urlencode

_DEFAULT_STORE = "mgrpo-store"
_SERVED_AT = "http://127.0.0.1:8050"
_PATH = re.compile(r"[A-Za-z0-9_.:/-]+")  # of agents: their names come from a config


@dataclass(frozen=True, slots=True)
class TraceLink:
    """A query by its position, `@3`, for ids are text of a dataset; a rollout of it; a trajectory of that."""

    store: str
    run: str
    iteration: int
    query_position: int
    rollout_index: int | None = None
    agent_path: str | None = None

    @property
    def command(self) -> str:
        """`mgrpo inspect …`, quoted for a shell."""
        words = ["mgrpo", "inspect", self.run, str(self.iteration), f"@{self.query_position}"]
        words += [] if self.rollout_index is None else ["--rollout", str(self.rollout_index)]
        if self.agent_path is not None and _PATH.fullmatch(self.agent_path):
            words += ["--agent", self.agent_path]
        if self.store != _DEFAULT_STORE:
            words += ["--store", self.store]
        return shlex.join(words)

    @property
    def page(self) -> str:
        """Where `mgrpo ui` shows it, from its root; a query without a rollout is a filter of the iteration's page."""
        page = f"/iteration/{self.iteration}"
        if self.rollout_index is None:
            return f"{page}?{urlencode({'query': self.query_position})}"
        page += f"/query/{self.query_position}/rollout/{self.rollout_index}"
        return page if self.agent_path is None else f"{page}?{urlencode({'at': self.agent_path}, errors='replace')}"

    @property
    def address(self) -> str:
        """The same, as `mgrpo ui` serves it by default."""
        return f"{_SERVED_AT}{self.page}"

    def to_json(self) -> dict[str, str]:
        """For programs."""
        return {"command": self.command, "page": self.page}
