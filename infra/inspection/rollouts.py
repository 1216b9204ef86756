"""The rollouts of one query, a line each: the group that advantages are relative to."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.inspection.wanted import matching
from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration
from infra.store.tables import stream_table
from infra.traces.filters import TraceFilter
from infra.traces.index import trajectory_index
from mgrpo_core.trajectories import Query

_compute: Any = pc


@dataclass(frozen=True, slots=True)
class Calls:
    """A sub-agent's invocations in a rollout. `reward` is their mean; None where none was scored."""

    agent: str
    count: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One attempt.

    Attributes:
        ended: status of the main trajectory, and why it stopped.
        reason: why it is in no loss; None where it is.
        advantage: of the main trajectory; None where the advantages table has no row for it.
        failed: of its trajectories, those that did not end well.
        sampled_tokens: over all of its trajectories.
        reply: the main agent's; None where it never answered.
        matches: trajectories that a filter leaves.
    """

    rollout: int
    correct: float | None
    reward: float | None
    advantage: float | None
    ended: str
    reason: str | None
    calls: tuple[Calls, ...]
    failed: int
    sampled_tokens: int
    reply: str | None
    matches: int


def rollout_lines(
    stored: StoredIteration, position: int, query: Query, wanted: TraceFilter, path: str | None = None
) -> list[RolloutLine]:
    """Rollouts with a trajectory that is wanted, in order. Figures are of the whole rollout."""
    index = trajectory_index(stored)
    index = index.filter(_compute.equal(index["query_position"], position))
    there = matching(stored, index, wanted, path)["rollout_index"].to_pylist()
    replies = _replies(stored, position, query.query_id)
    rows = index.to_pylist()
    found: list[RolloutLine] = []
    for rollout in sorted(set(there)):
        own = [row for row in rows if row["rollout_index"] == rollout]
        head = next((row for row in own if row["parent_id"] is None), None)
        if head is None:
            continue
        found.append(
            RolloutLine(
                rollout=rollout,
                correct=head["correct"],
                reward=head["reward"],
                advantage=head["advantage"],
                ended=head["status"] if head["status"] != "ok" else head["stop_reason"],
                reason=head["excluded_reason"],
                calls=tuple(calls for agent in stored.config.sub_agents if (calls := _calls(own, agent)) is not None),
                failed=sum(row["status"] != "ok" for row in own),
                sampled_tokens=sum(row["sampled_tokens"] for row in own),
                reply=replies.get(rollout),
                matches=there.count(rollout),
            )
        )
    return found


def _calls(rows: list[dict[str, Any]], agent: str) -> Calls | None:
    own = [row["reward"] for row in rows if row["agent"] == agent]
    scored = [reward for reward in own if reward is not None]
    return Calls(agent, len(own), sum(scored) / len(scored) if scored else None) if own else None


def _replies(stored: StoredIteration, position: int, query_id: str) -> dict[int, str | None]:
    columns = ("query_id", "rollout_index", "reply")
    parts = [
        group
        for ref in stored.shards(stored.config.main_agent)
        for group in stream_table(stored.files, ref.path, TRAJECTORIES, columns, holding=("query_position", position))
    ]
    rows = pa.concat_tables(parts).to_pylist() if parts else []
    return {row["rollout_index"]: row["reply"] for row in rows if row["query_id"] == query_id}
