"""Where to look at a trajectory: a command to type. Made of numbers and checked names, so that it is safe to paste."""

import re
import shlex
from dataclasses import dataclass

_DEFAULT_STORE = "mgrpo-store"
_PATH = re.compile(r"[A-Za-z0-9_.:/-]+")  # of agents: their names come from a config


@dataclass(frozen=True, slots=True)
class TraceLink:
    """A trajectory, or with `agent_path` None a rollout.

    A query is named by its position, `@3`: ids are text of a dataset.
    """

    store: str
    run: str
    iteration: int
    query_position: int
    rollout_index: int
    agent_path: str | None = None

    @property
    def command(self) -> str:
        """`mgrpo inspect …`, quoted for a shell."""
        words = ["mgrpo", "inspect", self.run, str(self.iteration), f"@{self.query_position}"]
        words += ["--rollout", str(self.rollout_index)]
        if self.agent_path is not None and _PATH.fullmatch(self.agent_path):
            words += ["--agent", self.agent_path]
        if self.store != _DEFAULT_STORE:
            words += ["--store", self.store]
        return shlex.join(words)

    def to_json(self) -> dict[str, str]:
        """For programs."""
        return {"command": self.command}
