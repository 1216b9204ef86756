"""One row a trajectory of an iteration, of what fits a line: identity, how it ended, reward, credit."""

import pyarrow as pa
import pyarrow.compute as pc

from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration
from infra.store.tables import read_table

_TRAJECTORY = (
    "trajectory_id", "parent_id", "query_position", "query_id", "rollout_index", "agent", "agent_path", "depth",
    "call_index", "policy", "policy_version", "status", "stop_reason", "failure", "tokens", "sampled_tokens",
)  # fmt: skip
_REWARD = ("status", "reason", "reward", "format", "correct", "main_correct", "expert")
_ADVANTAGE = ("advantage", "weight", "included", "excluded_reason")
_ORDER = [(name, "ascending") for name in ("query_position", "rollout_index", "depth", "call_index", "agent_path")]


def trajectory_index(stored: StoredIteration) -> pa.Table:
    """Every trajectory of an iteration; no token, message or turn is read.

    Columns: those of the trajectories table up to `failure` and its two counts of tokens; `reward_status`, `reason`,
    `reward` and its components; `advantage`, `weight`, `included`, `excluded_reason`. What the rewards or advantages
    table does not say of a trajectory is null.

    Returns: a table sorted by query, rollout, depth and call.
    Raises: TableIntegrityError if a table is damaged.
    """
    paths = [ref.path for refs in stored.all_shards().values() for ref in refs]
    index = read_table(stored.files, paths, TRAJECTORIES, _TRAJECTORY).sort_by(_ORDER)
    index = _joined(index, stored.table("rewards", ["trajectory_id", *_REWARD]), {"status": "reward_status"})
    return _joined(index, stored.table("advantages", ["trajectory_id", *_ADVANTAGE]), {})


def _joined(index: pa.Table, other: pa.Table, renamed: dict[str, str]) -> pa.Table:
    """The other table's columns beside the index, by trajectory; the index keeps its order."""
    keys = other.column("trajectory_id").combine_chunks()
    place = pc.index_in(index.column("trajectory_id"), value_set=keys)  # type: ignore[attr-defined]
    for name in other.column_names:
        if name != "trajectory_id":
            index = index.append_column(renamed.get(name, name), other.column(name).take(place))
    return index
