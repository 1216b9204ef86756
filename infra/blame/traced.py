"""What rankings have in common: each row is a trajectory, and says where its trace is."""

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from infra.traces.links import TraceLink


@dataclass(frozen=True, slots=True)
class Traced:
    """A trajectory, and where it is.

    Attributes:
        reward: None where there is none.
    """

    trajectory_id: str
    agent: str
    agent_path: str
    query_position: int
    query_id: str
    rollout_index: int
    call_index: int
    reward: float | None


Row = TypeVar("Row", bound=Traced)


@dataclass(frozen=True, slots=True)
class Ranking(Generic[Row]):
    """The first trajectories of a policy's, by some measure."""

    store: str
    run: str
    policy: str
    iteration: int
    ranked: tuple[Row, ...]

    def links(self) -> list[TraceLink]:
        """Where to look at each."""
        return [
            TraceLink(self.store, self.run, self.iteration, one.query_position, one.rollout_index, one.agent_path)
            for one in self.ranked
        ]

    def to_json(self) -> dict[str, Any]:
        """For programs: each trajectory with the links to its trace, after what is said of all of them."""
        found = asdict(self)
        rows = zip(found.pop("ranked"), self.links(), strict=True)
        return {**found, "ranked": [{**row, "trace": link.to_json()} for row, link in rows]}
