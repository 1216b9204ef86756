"""The advantages table: each aligned trajectory against its own group, per agent and query."""

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
    rows = rewards.select(REWARD_COLUMNS).to_pylist()
    weights = _weights(alignment)
    columns: dict[str, list[Any]] = {name: [] for name in ADVANTAGES.columns.names}
    for name, agent in config.agents.items():
        own = [row for row in rows if row["agent"] == name]
        observed_N = np.array([row["reward"] is not None for row in own], dtype=bool)
        weight_N = np.array([weights.get(row["trajectory_id"], 0.0) for row in own])
        result = grouped_advantages(
            np.array([row["reward"] if row["reward"] is not None else 0.0 for row in own], dtype=np.float64),
            np.array([row["query_id"] for row in own], dtype=np.str_),
            weight_N,
            observed_N,
            normalization=config.advantage.normalization,
            eps=config.advantage.eps,
        )
        for index, row in enumerate(own):
            group = int(result.group_index_N[index])
            grouped = result.size_G[group] > 0
            columns["trajectory_id"].append(row["trajectory_id"])
            columns["agent"].append(name)
            columns["policy"].append(agent.policy)
            columns["query_id"].append(row["query_id"])
            columns["reward"].append(row["reward"])
            columns["weight"].append(float(weight_N[index]))
            columns["advantage"].append(float(result.advantage_N[index]))
            columns["group_mean"].append(float(result.mean_G[group]) if grouped else None)
            columns["group_std"].append(float(result.std_G[group]) if grouped else None)
            columns["group_size"].append(int(result.size_G[group]))
            columns["included"].append(bool(result.included_N[index]))
            columns["excluded_reason"].append(_reason(result, index, row, weight_N[index]))
    return table_of(ADVANTAGES, columns)


def _weights(alignment: pa.Table) -> dict[str, float]:
    """Total multiplicity of each trajectory over its slots."""
    table = alignment.select(SLOT_COLUMNS).to_pydict()
    weights: dict[str, float] = {}
    for trajectory_id, weight in zip(table["trajectory_id"], table["weight"], strict=True):
        if trajectory_id is not None:
            weights[trajectory_id] = weights.get(trajectory_id, 0.0) + weight
    return weights


def _reason(result: GroupAdvantages, index: int, row: dict[str, Any], weight: float) -> str | None:
    """Why a row is in no loss; None for one that is."""
    if result.included_N[index]:
        return None
    if row["reward"] is None:
        return f"{row['status']}: {row['reason']}"
    if not weight:
        return "dropped by alignment"
    group = result.group_index_N[index]
    if result.zero_variance_G[group]:
        return "zero variance: all rewards of the group are equal"
    return "singleton: nothing to compare it with"
