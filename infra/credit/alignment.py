"""The alignment table: which trajectory fills which slot. Indices and weights; tokens stay where they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from infra.store.schemas import ALIGNMENT
from infra.store.tables import table_of
from mgrpo_core.config import RunConfig
from mgrpo_core.credit.alignment import align, rollout_keys

ALIGNED_COLUMNS = ("trajectory_id", "agent", "query_id", "rollout_index", "status")
"""What alignment reads of the rewards table."""


@dataclass(frozen=True, slots=True)
class Members:
    """An agent's scored trajectories as `align` takes them.

    Attributes:
        row_N: their rows in the rewards table.
        rollout_N: their rollouts: query position x rollouts a query + rollout index.
        rollout_key_R: of every rollout of the queries.
    """

    row_N: np.ndarray
    rollout_N: np.ndarray
    rollout_key_R: np.ndarray


def members_of(
    config: RunConfig, iteration: int, agent: str, query_ids: Sequence[str], rewards: Mapping[str, np.ndarray]
) -> Members:
    """An agent's members.

    Args:
        config: of the run.
        iteration: its number; picks are drawn from it.
        agent: its name.
        query_ids: of the iteration's queries, in order.
        rewards: `ALIGNED_COLUMNS` of the rewards table, as objects; see `aligned_columns`.
    """
    k = config.rollout.rollouts_per_query
    place = {query_id: position * k for position, query_id in enumerate(query_ids)}
    row_N = np.flatnonzero((rewards["agent"] == agent) & (rewards["status"] == "scored"))
    rollout_N = np.array(
        [place[rewards["query_id"][row]] + rewards["rollout_index"][row] for row in row_N], dtype=np.int64
    )
    queries_R = [query_id for query_id in query_ids for _ in range(k)]
    indices_R = list(range(k)) * len(query_ids)
    return Members(row_N, rollout_N, rollout_keys(config.seed, iteration, agent, queries_R, indices_R))


def aligned_columns(rewards: pa.Table) -> dict[str, np.ndarray]:
    """`ALIGNED_COLUMNS` of a rewards table as `members_of` takes them."""
    return {name: np.array(rewards.column(name).to_pylist(), dtype=object) for name in ALIGNED_COLUMNS}


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
    arrays = aligned_columns(rewards)
    k = config.rollout.rollouts_per_query
    columns: dict[str, list[Any]] = {name: [] for name in ALIGNMENT.columns.names}
    for name, agent in config.agents.items():
        members = members_of(config, iteration, name, query_ids, arrays)
        is_main = name == config.main_agent
        d, mode = (1, "none") if is_main else (agent.d, config.alignment.mode)
        aligned = align(members.rollout_N, members.rollout_key_R, d, mode)
        ids = arrays["trajectory_id"][members.row_N]
        columns["agent"] += [name] * len(aligned.rollout_M)
        columns["query_id"] += [query_ids[position] for position in (aligned.rollout_M // k).tolist()]
        columns["rollout_index"] += (aligned.rollout_M % k).tolist()
        columns["slot"] += aligned.slot_M.tolist()
        columns["trajectory_id"] += [ids[member] if member >= 0 else None for member in aligned.member_M]
        columns["copy_index"] += aligned.copy_M.tolist()
        columns["weight"] += aligned.weight_M.tolist()
    return table_of(ALIGNMENT, columns)
