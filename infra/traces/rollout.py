"""A rollout as people read it: the main trajectory, and under it what it delegated, with rewards and credit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration
from infra.store.tables import stream_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of
from mgrpo_core.errors import StoreError, TableIntegrityError
from mgrpo_core.trajectories import Query, Trajectory

_MOST_NAMED = 8
_compute: Any = pc
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a reward. `score` is None where there is none; `weight` is what it counts with."""

    name: str
    score: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class RewardRow:
    """A trajectory's row of the rewards table; see its schema. No weight: no part of the agent's reward."""

    status: str
    reason: str | None
    reward: float | None
    format: float | None
    correct: float | None
    main_correct: float | None
    expert: float | None
    format_weight: float
    correct_weight: float | None
    main_correct_weight: float | None
    expert_weight: float | None
    verifier: str | None
    judge_version: str | None

    @property
    def components(self) -> tuple[Component, ...]:
        """What the reward is made of."""
        named = ((name, getattr(self, f"{name}_weight")) for name in ("format", "correct", "main_correct", "expert"))
        return tuple(Component(name, getattr(self, name), weight) for name, weight in named if weight is not None)


@dataclass(frozen=True, slots=True)
class AdvantageRow:
    """A trajectory's row of the advantages table; see its schema."""

    advantage: float
    weight: float
    group_mean: float | None
    group_std: float | None
    group_size: int
    included: bool
    excluded_reason: str | None


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A trajectory with what came of it. `reward` and `advantage` are None where their table has no row for it.

    Attributes:
        children: what it delegated, in the order of its calls.
    """

    trajectory: Trajectory
    reward: RewardRow | None
    advantage: AdvantageRow | None
    children: tuple["TraceNode", ...]


@dataclass(frozen=True, slots=True)
class RolloutTrace:
    """One attempt at a query."""

    query: Query
    root: TraceNode


def read_rollout(stored: StoredIteration, query_id: str, rollout_index: int, *, tokens: bool) -> RolloutTrace:
    """One rollout of an iteration; only the row groups that may hold it are read.

    Args:
        stored: the iteration.
        query_id: of its query.
        rollout_index: which attempt at it.
        tokens: whether ids, mask and log-probs are wanted; without, the trajectories' arrays are empty.

    Raises:
        StoreError: there is no such query or rollout; says which there are.
        TableIntegrityError: a table is damaged, or a trajectory's parent is not there.
    """
    queries = stored.queries()
    position = next((place for place, one in enumerate(queries) if one.query_id == query_id), None)
    if position is None:
        raise StoreError(f"{_place(stored)} has no query {query_id!r}. It has {_named([q.query_id for q in queries])}.")
    rows, rollouts = _rows(stored, position, query_id, rollout_index, tokens=tokens)
    if not rows:
        there = ", ".join(map(str, sorted(rollouts))) or "none"
        raise StoreError(
            f"{_place(stored)}: query {query_id!r} has no rollout {rollout_index}. Rollouts there: {there}."
        )
    return RolloutTrace(queries[position], _tree(stored, query_id, rows))


def _rows(
    stored: StoredIteration, position: int, query_id: str, rollout_index: int, *, tokens: bool
) -> tuple[list[Trajectory], set[int]]:
    """The rollout's trajectories, and which rollouts the query has."""
    columns = None if tokens else OUTCOME_COLUMNS
    found: list[Trajectory] = []
    rollouts: set[int] = set()
    for refs in stored.all_shards().values():
        for ref in refs:
            for group in stream_table(
                stored.files, ref.path, TRAJECTORIES, columns, holding=("query_position", position)
            ):
                of_query = group.filter(_compute.equal(group.column("query_id"), query_id))
                rollouts.update(of_query.column("rollout_index").to_pylist())
                own = of_query.filter(_compute.equal(of_query.column("rollout_index"), rollout_index))
                found.extend(trajectories_of(own.combine_chunks()))
    return found, rollouts


def _tree(stored: StoredIteration, query_id: str, trajectories: Sequence[Trajectory]) -> TraceNode:
    rewards = _by_trajectory(
        stored.table("rewards", ["trajectory_id", "query_id", *_names(RewardRow)]), query_id, RewardRow
    )
    credit = _by_trajectory(
        stored.table("advantages", ["trajectory_id", "query_id", *_names(AdvantageRow)]), query_id, AdvantageRow
    )
    ids = {one.trajectory_id for one in trajectories}
    children: dict[str | None, list[Trajectory]] = {}
    for one in sorted(trajectories, key=lambda one: one.key.call_order):
        if one.parent_id is not None and one.parent_id not in ids:
            raise TableIntegrityError(
                f"{_place(stored)}: trajectory {one.trajectory_id} ({one.key.agent_path} of query {query_id!r}) has no "
                "parent. Run `mgrpo verify`, which names what is missing."
            )
        children.setdefault(one.parent_id, []).append(one)

    def node(one: Trajectory) -> TraceNode:
        below = tuple(node(child) for child in children.get(one.trajectory_id, ()))
        return TraceNode(one, rewards.get(one.trajectory_id), credit.get(one.trajectory_id), below)

    return node(children[None][0])


def _by_trajectory(table: pa.Table, query_id: str, make: type[_Row]) -> Mapping[str, _Row]:
    own = table.filter(_compute.equal(table.column("query_id"), query_id))
    names = _names(make)
    return {row["trajectory_id"]: make(**{name: row[name] for name in names}) for row in own.to_pylist()}


def _names(row: Any) -> list[str]:
    return [field.name for field in fields(row)]


def _place(stored: StoredIteration) -> str:
    run, iteration = stored.place
    return f"iteration {iteration} of run {run!r}"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown or "none"
