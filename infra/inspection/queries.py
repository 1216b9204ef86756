"""The queries of an iteration, a line each, and which query somebody means."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.inspection.wanted import matching
from infra.store.stored_iteration import StoredIteration
from infra.traces.filters import TraceFilter
from infra.traces.index import trajectory_index
from mgrpo_core.errors import ConfigError
from mgrpo_core.trajectories import Query, Status

_compute: Any = pc  # its functions are made when it is imported; type checkers do not see them
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class QueryLine:
    """What became of a query.

    Attributes:
        success: mean correctness of its rollouts; None where none was scored.
        reward: mean reward of the main agent, likewise.
        invocations: of all sub-agents.
        signal: agents of which a trajectory of this query entered the loss, in the config's order.
        policy_failed: trajectories that ended by the policy's fault.
        infra_failed: by ours.
        matches: trajectories that a filter leaves; all of them without one.
    """

    position: int
    query_id: str
    question: str
    rollouts: int
    success: float | None
    reward: float | None
    invocations: int
    signal: tuple[str, ...]
    policy_failed: int
    infra_failed: int
    matches: int


def query_lines(stored: StoredIteration, wanted: TraceFilter, path: str | None = None) -> list[QueryLine]:
    """Queries with a trajectory that is wanted, in order. Figures are of the whole query."""
    index = trajectory_index(stored)
    main = index.filter(_compute.equal(index["agent"], stored.config.main_agent))
    subs = index.filter(_compute.not_equal(index["agent"], stored.config.main_agent))
    counts = _by_query(main, [("trajectory_id", "count"), ("correct", "mean"), ("reward", "mean")])
    calls = _by_query(subs, [("trajectory_id", "count")])
    failed = {
        status: _by_query(index.filter(_compute.equal(index["status"], str(status))), [("trajectory_id", "count")])
        for status in (Status.POLICY_FAILED, Status.INFRA_FAILED)
    }
    included = index.filter(_compute.fill_null(index["included"], False)).group_by(["query_position", "agent"])
    signal = {(row["query_position"], row["agent"]) for row in included.aggregate([]).to_pylist()}
    matches = _by_query(matching(stored, index, wanted, path), [("trajectory_id", "count")])
    found: list[QueryLine] = []
    for position, query in enumerate(stored.queries()):
        if position in matches:
            whole = counts.get(position, {})
            found.append(
                QueryLine(
                    position=position,
                    query_id=query.query_id,
                    question=query.question,
                    rollouts=whole.get("trajectory_id_count", 0),
                    success=whole.get("correct_mean"),
                    reward=whole.get("reward_mean"),
                    invocations=_count(calls, position),
                    signal=tuple(name for name in stored.config.agents if (position, name) in signal),
                    policy_failed=_count(failed[Status.POLICY_FAILED], position),
                    infra_failed=_count(failed[Status.INFRA_FAILED], position),
                    matches=_count(matches, position),
                )
            )
    return found


def find_query(stored: StoredIteration, asked: str) -> tuple[int, Query]:
    """The query with an id, or at a position: `@3`, or `3` where no id is that.

    Raises: ConfigError naming some of those that there are.
    """
    queries = stored.queries()
    at = asked.removeprefix("@")
    for position, query in enumerate(queries):
        if query.query_id == asked and not (asked.startswith("@") and at.isdecimal()):
            return position, query
    if at.isdecimal() and len(at) < 10 and int(at) < len(queries):
        return int(at), queries[int(at)]
    run, iteration = stored.place
    raise ConfigError(f"iteration {iteration} of run {run!r} has no query {asked!r}. It has {_named(queries)}.")


def _named(queries: Sequence[Query]) -> str:
    shown = ", ".join(f"@{position} {query.query_id!r}" for position, query in enumerate(queries[:_MOST_NAMED]))
    return f"{shown}, … to @{len(queries) - 1}" if len(queries) > _MOST_NAMED else shown or "none"


def _by_query(table: pa.Table, wanted: list[tuple[str, str]]) -> dict[int, dict[str, Any]]:
    return {row["query_position"]: row for row in table.group_by("query_position").aggregate(wanted).to_pylist()}


def _count(by_query: dict[int, dict[str, Any]], position: int) -> int:
    return by_query.get(position, {}).get("trajectory_id_count", 0)
