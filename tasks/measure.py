"""Stage: the numbers of an iteration, from its small tables and columns: no token is read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infra.resources import RunResources
from infra.store.files import FileRef
from infra.store.rewritten_prompts import next_prompts_of
from infra.store.schemas import ADVANTAGES, ALIGNMENT, REWARDS, TRAJECTORIES
from infra.store.tables import read_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of
from infra.training.policy_update import PolicyUpdate
from mgrpo_core.rollout.counts import count_trajectories
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables

SmallTables = tuple[FileRef, FileRef, FileRef]
"""Rewards, alignment, advantages."""

_COMPONENTS = ("reward", "format", "correct", "main_correct", "expert")


@stage
async def measure_iteration(
    resources: RunResources,
    at: IterationRef,
    tables: TrajectoryTables,
    small_tables: SmallTables,
    updates: Sequence[PolicyUpdate],
) -> dict[str, float]:
    """Flat metrics, `<agent>/<metric>` and `update/<policy>/<metric>`; a mean over nothing is left out.

    See docs/metrics.md for what each is.
    """
    files, config = resources.files, resources.config
    rewards, alignment, advantages = small_tables
    reward_rows = read_table(files, rewards.path, REWARDS).to_pylist()
    slots = read_table(files, alignment.path, ALIGNMENT).to_pylist()
    credit = read_table(files, advantages.path, ADVANTAGES).to_pylist()
    metrics: dict[str, float] = {"epoch": float(at.epoch)}
    for agent in config.agents:
        own = [row for row in reward_rows if row["agent"] == agent]
        metrics[f"{agent}/trajectories"] = float(len(own))
        metrics[f"{agent}/reward_missing"] = float(sum(row["reward"] is None for row in own))
        for component in _COMPONENTS:
            values = [row[component] for row in own if row[component] is not None]
            if values:
                metrics[f"{agent}/{component}"] = float(np.mean(values))
        metrics |= _credit_metrics(agent, [row for row in credit if row["agent"] == agent])
        metrics |= _rollout_metrics(agent, resources, tables)
        if config.rollout.max_staleness:
            metrics |= _staleness(agent, resources, at, tables)
        if agent != config.main_agent:
            delegations = _per_rollout(own, len(at.query_indices) * config.rollout.rollouts_per_query)
            metrics[f"{agent}/invocations_mean"] = float(delegations.mean())
            metrics[f"{agent}/invocations_max"] = float(delegations.max(initial=0))
            metrics[f"{agent}/rollouts_without"] = float((delegations == 0).mean())
            metrics[f"{agent}/rollouts_beyond_d"] = float((delegations > config.agents[agent].d).mean())
            own_slots = [row for row in slots if row["agent"] == agent]
            metrics[f"{agent}/aligned_copies"] = float(sum(row["copy_index"] > 0 for row in own_slots))
    main = [row for row in reward_rows if row["agent"] == config.main_agent]
    solved = [
        row["correct"] * row["format"] for row in main if row["correct"] is not None and row["format"] is not None
    ]
    if solved:
        metrics["success"] = float(np.mean(solved))
    metrics |= {f"seconds/{name}": value for name, value in resources.clock.seconds().items()}
    for update in updates:
        metrics |= _update_metrics(update, files.read(update.figures.path))
    return metrics


def _per_rollout(rows: Sequence[Mapping[str, Any]], rollouts: int) -> np.ndarray:
    counts: dict[tuple[str, int], int] = {}
    for row in rows:
        place = (row["query_id"], row["rollout_index"])
        counts[place] = counts.get(place, 0) + 1
    return np.array([*counts.values(), *[0] * (rollouts - len(counts))])


def _credit_metrics(agent: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    groups = {row["query_id"]: row for row in rows if row["group_size"] > 0}
    if not groups:
        return {}
    flat = sum(row["group_size"] >= 2 and row["group_std"] == 0 for row in groups.values())
    return {
        f"{agent}/groups": float(len(groups)),
        f"{agent}/zero_variance_groups": flat / len(groups),
        f"{agent}/singleton_groups": sum(row["group_size"] == 1 for row in groups.values()) / len(groups),
        f"{agent}/included": float(sum(row["included"] for row in rows)),
    }


def _rollout_metrics(agent: str, resources: RunResources, tables: TrajectoryTables) -> dict[str, float]:
    outcomes = read_table(resources.files, tables.paths(agent), TRAJECTORIES, OUTCOME_COLUMNS)
    counts = count_trajectories(trajectories_of(outcomes))
    rewritten_share = next_prompts_of(outcomes).share
    sampled = read_table(resources.files, tables.paths(agent), TRAJECTORIES, ["sampled_tokens", "tokens"])
    metrics = {
        f"{agent}/infra_failed": float(counts.infra_failed),
        f"{agent}/policy_failed": float(counts.policy_failed),
        f"{agent}/malformed_turns": float(counts.malformed_turns),
        f"{agent}/truncated_turns": float(counts.truncated_turns),
        f"{agent}/refused_calls_share": counts.refused_share,
    }
    if rewritten_share is not None:
        metrics[f"{agent}/rewritten_share"] = rewritten_share
    if counts.trajectories:
        tokens = sampled.column("sampled_tokens").to_numpy()
        metrics[f"{agent}/turns_mean"] = counts.turns / counts.trajectories
        metrics[f"{agent}/sampled_tokens"] = float(tokens.sum())
        metrics[f"{agent}/sampled_tokens_mean"] = float(tokens.mean())
        metrics[f"{agent}/tokens_mean"] = float(sampled.column("tokens").to_numpy().mean())
    return metrics


def _staleness(agent: str, resources: RunResources, at: IterationRef, tables: TrajectoryTables) -> dict[str, float]:
    """Versions that the weights which sampled a trajectory are behind those which train on it."""
    policy = resources.config.agents[agent].policy
    sampled_by = read_table(resources.files, tables.paths(agent), TRAJECTORIES, ["policy_version"])
    behind = at.versions[policy] - sampled_by.column("policy_version").drop_null().to_numpy()
    if not len(behind):
        return {}
    return {f"{agent}/staleness_mean": float(behind.mean()), f"{agent}/staleness_max": float(behind.max())}


def _update_metrics(update: PolicyUpdate, figures: bytes) -> dict[str, float]:
    record = json.loads(figures)
    metrics = {f"update/{update.policy}/{name}": float(value) for name, value in record["figures"].items()}
    metrics[f"update/{update.policy}/version"] = float(update.step.to_version)
    return metrics
