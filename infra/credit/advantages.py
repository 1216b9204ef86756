"""The advantages table: each aligned trajectory against its own group, per agent and query."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from infra.store.schemas import ADVANTAGES
from infra.store.tables import table_of
from mgrpo_core.config import RunConfig
from mgrpo_core.credit.advantages import GroupAdvantages, grouped_advantages

REWARD_COLUMNS = ("trajectory_id", "agent", "query_id", "reward", "status", "reason")
"""What advantages read of the rewards table."""
SLOT_COLUMNS = ("trajectory_id", "weight")
"""And of the alignment table."""


def advantages_table(config: RunConfig, rewards: pa.Table, alignment: pa.Table) -> pa.Table:
    """Compare within groups, agent by agent; one row a trajectory, those left out with the reason why.

    Args:
        config: of the run.
        rewards: at least `REWARD_COLUMNS` of the rewards table.
        alignment: at least `SLOT_COLUMNS` of the alignment table.
    """
    weights = _weights(alignment)
    agent_N = np.array(rewards.column("agent").to_pylist(), dtype=object)
    columns: dict[str, list[Any]] = {name: [] for name in ADVANTAGES.columns.names}
    for name, agent in config.agents.items():
        own = rewards.select(REWARD_COLUMNS).take(np.flatnonzero(agent_N == name)).to_pydict()
        ids, given = own["trajectory_id"], own["reward"]
        weight_N = np.array([weights.get(one, 0.0) for one in ids])
        result = grouped_advantages(
            np.array([0.0 if one is None else one for one in given], dtype=np.float64),
            np.array(own["query_id"], dtype=np.str_),
            weight_N,
            np.array([one is not None for one in given], dtype=bool),
            normalization=config.advantage.normalization,
            eps=config.advantage.eps,
        )
        group_N = result.group_index_N
        size_N = result.size_G[group_N]
        columns["trajectory_id"] += ids
        columns["agent"] += [name] * len(ids)
        columns["policy"] += [agent.policy] * len(ids)
        columns["query_id"] += own["query_id"]
        columns["reward"] += given
        columns["weight"] += weight_N.tolist()
        columns["advantage"] += result.advantage_N.tolist()
        columns["group_mean"] += _where(size_N > 0, result.mean_G[group_N])
        columns["group_std"] += _where(size_N > 0, result.std_G[group_N])
        columns["group_size"] += size_N.tolist()
        columns["included"] += result.included_N.tolist()
        columns["excluded_reason"] += _reasons(result, weight_N, own)
    return table_of(ADVANTAGES, columns)


def _where(there_N: np.ndarray, value_N: np.ndarray) -> list[float | None]:
    return [value if there else None for there, value in zip(there_N.tolist(), value_N.tolist(), strict=True)]


def _weights(alignment: pa.Table) -> dict[str, float]:
    """Total multiplicity of each trajectory over its slots."""
    table = alignment.select(SLOT_COLUMNS).to_pydict()
    weights: dict[str, float] = {}
    for trajectory_id, weight in zip(table["trajectory_id"], table["weight"], strict=True):
        if trajectory_id is not None:
            weights[trajectory_id] = weights.get(trajectory_id, 0.0) + weight
    return weights


def _reasons(result: GroupAdvantages, weight_N: np.ndarray, own: Mapping[str, Sequence[Any]]) -> list[str | None]:
    """Why a row is in no loss; None for one that is."""
    reasons: list[str | None] = [None] * len(weight_N)
    for row in np.flatnonzero(~result.included_N).tolist():
        if own["reward"][row] is None:
            reasons[row] = f"{own['status'][row]}: {own['reason'][row]}"
        elif not weight_N[row]:
            reasons[row] = "dropped by alignment"
        elif result.zero_variance_G[result.group_index_N[row]]:
            reasons[row] = "zero variance: all rewards of the group are equal"
        else:
            reasons[row] = "singleton: nothing to compare it with"
    return reasons
