"""The tables of an iteration as its stages pass them on: references, one a table, JSON as they stand."""

from collections.abc import Mapping
from dataclasses import dataclass

from infra.store.files import FileRef


@dataclass(frozen=True, slots=True)
class TrajectoryTables:
    """Shards of the trajectory tables, by agent."""

    shards: Mapping[str, tuple[FileRef, ...]]

    def paths(self, agent: str) -> list[str]:
        return [ref.path for ref in self.shards[agent]]
