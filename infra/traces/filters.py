"""Which trajectories somebody wants to see."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration
from infra.store.tables import stream_table
from mgrpo_core.errors import ConfigError

Sign = Literal["+", "-", "0"]

# pyarrow makes its compute functions when it is imported; type checkers do not see them.
_compute: Any = pc


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """What must hold of a trajectory; None = anything does.

    Attributes:
        agent, status, query_id, rollout_index, policy: as the trajectories table has them.
        sign: of the advantage.
        min_reward, max_reward: bounds, both included; a trajectory without a reward is outside any.
        text: somewhere in its task, its reply or a message, whatever the case.

    Raises: ConfigError for a sign that is none.
    """

    agent: str | None = None
    status: str | None = None
    sign: Sign | None = None
    query_id: str | None = None
    rollout_index: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None
    policy: str | None = None

    def __post_init__(self) -> None:
        if self.sign is not None and self.sign not in get_args(Sign):
            raise ConfigError(f"sign {self.sign!r} of an advantage: expected +, - or 0.")


def select(stored: StoredIteration, index: pa.Table, wanted: TraceFilter) -> pa.Table:
    """The rows of an index that are wanted, in its order. Text is looked for last, a row group at a time.

    Args:
        stored: where the text is.
        index: of `trajectory_index`, or some of its rows.
        wanted: the filter.
    """
    for name in ("agent", "status", "query_id", "rollout_index", "policy"):
        value = getattr(wanted, name)
        if value is not None:
            index = index.filter(_compute.equal(index.column(name), value))
    if wanted.sign is not None:
        compare = {"+": _compute.greater, "-": _compute.less, "0": _compute.equal}[wanted.sign]
        index = index.filter(compare(index.column("advantage"), 0.0))
    if wanted.min_reward is not None:
        index = index.filter(_compute.greater_equal(index.column("reward"), wanted.min_reward))
    if wanted.max_reward is not None:
        index = index.filter(_compute.less_equal(index.column("reward"), wanted.max_reward))
    if wanted.text:
        found = pa.concat_arrays([pa.array([], pa.string()), *_saying(stored, index, wanted.text)])
        index = index.filter(_compute.is_in(index.column("trajectory_id"), value_set=found))
    return index


def _saying(stored: StoredIteration, index: pa.Table, text: str) -> Iterator[pa.Array]:
    """Ids of trajectories that say it, of the index's agents; where it is of one query, of that query's row groups."""
    positions = index.column("query_position").unique()
    holding = ("query_position", positions[0].as_py()) if len(positions) == 1 else None
    for agent in index.column("agent").unique().to_pylist():
        for shard in stored.shards(agent):
            columns = ["trajectory_id", "task", "reply", "messages"]
            for group in stream_table(stored.files, shard.path, TRAJECTORIES, columns, holding=holding):
                yield _ids_saying(group, text)


def _ids_saying(group: pa.Table, text: str) -> pa.Array:
    def says(column: Any) -> Any:
        return _compute.fill_null(_compute.match_substring(column, text, ignore_case=True), False)

    messages = group.column("messages").combine_chunks()
    said = says(_compute.struct_field(messages.flatten(), "content"))
    rows = _compute.unique(_compute.list_parent_indices(messages).filter(said))
    in_message = _compute.is_in(pa.array(range(group.num_rows), pa.int64()), value_set=rows.cast(pa.int64()))
    whole = _compute.or_(_compute.or_(says(group.column("task")), says(group.column("reply"))), in_message)
    return group.column("trajectory_id").filter(whole).combine_chunks()
