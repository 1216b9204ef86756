"""The alignment table: which trajectory fills which slot. Indices and weights; tokens stay where they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from infra.store.schemas import ALIGNMENT
from infra.store.tables import table_of
from mgrpo_core.config import RunConfig
from mgrpo_core.credit.alignment import align, rollout_keys

ALIGNED_COLUMNS = ("trajectory_id", "agent", "query_id", "rollout_index", "status")
"""What alignment reads of the rewards table."""


def alignment_table(config: RunConfig, iteration: int, query_ids: Sequence[str], rewards: pa.Table) -> pa.Table:
    """Align the scored trajectories of each agent.

    A trajectory without a reward is no member: it fills no slot, as if the invocation had not been (algorithm.md §6,
    rows 1 and 11). The main agent has one slot a rollout.

    Args:
        config: of the run.
        iteration: its number; picks are drawn from it.
        query_ids: of the iteration's queries, in order.
        rewards: at least `ALIGNED_COLUMNS` of the rewards table.
    """
    arrays = {name: np.array(rewards.column(name).to_pylist(), dtype=object) for name in ALIGNED_COLUMNS}
    k = config.rollout.rollouts_per_query
    place = {query_id: position * k for position, query_id in enumerate(query_ids)}
    queries_R = [query_id for query_id in query_ids for _ in range(k)]
    indices_R = list(range(k)) * len(query_ids)

    columns: dict[str, list[Any]] = {name: [] for name in ALIGNMENT.columns.names}
    for name, agent in config.agents.items():
        members = np.flatnonzero((arrays["agent"] == name) & (arrays["status"] == "scored"))
        rollout_N = np.array(
            [place[arrays["query_id"][row]] + arrays["rollout_index"][row] for row in members], dtype=np.int64
        )
        keys = rollout_keys(config.seed, iteration, name, queries_R, indices_R)
        is_main = name == config.main_agent
        aligned = align(rollout_N, keys, 1 if is_main else agent.d, "none" if is_main else config.alignment.mode)
        ids = arrays["trajectory_id"][members]
        columns["agent"] += [name] * len(aligned.rollout_M)
        columns["query_id"] += [queries_R[rollout] for rollout in aligned.rollout_M]
        columns["rollout_index"] += [indices_R[rollout] for rollout in aligned.rollout_M]
        columns["slot"] += aligned.slot_M.tolist()
        columns["trajectory_id"] += [ids[member] if member >= 0 else None for member in aligned.member_M]
        columns["copy_index"] += aligned.copy_M.tolist()
        columns["weight"] += aligned.weight_M.tolist()
    return table_of(ALIGNMENT, columns)
