"""The rewards table: one row a trajectory, every component kept."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from infra.credit.grades import Grades, Outcomes
from infra.store.schemas import REWARDS
from infra.store.tables import table_of
from mgrpo_core.config import RewardConfig, RunConfig
from mgrpo_core.rewards.compose import MainWeights, SubWeights, TrajectoryReward, score_rollout
from mgrpo_core.trajectories import Rollout, Trajectory


def rewards_table(config: RunConfig, positions: Mapping[str, int], outcomes: Outcomes, grades: Grades) -> pa.Table:
    """Rows of whole rollouts: the main trajectory first, then all under it. A rollout's rows depend on no other one.

    Args:
        config: of the run.
        positions: of the iteration's queries, by query id.
        outcomes: of some rollouts or all, whole ones; sub-trajectories without their main one are left out.
        grades: of these outcomes.
    """
    main = config.reward_of(config.main_agent)
    main_weights = MainWeights(main.format, main.correct or 0.0)
    sub_weights = {agent: _sub_weights(config.reward_of(agent)) for agent in config.sub_agents}
    columns: dict[str, list[Any]] = {name: [] for name in REWARDS.columns.names}
    fixed = {agent: _fixed(config, grades, agent) for agent in config.agents}
    for rollout in _rollouts(outcomes, config.main_agent):
        correct = grades.corrects[rollout.trajectories[0].trajectory_id]
        rewards = score_rollout(rollout, correct, grades.experts, main_weights=main_weights, sub_weights=sub_weights)
        position = positions[rollout.query_id]
        ids: dict[str, str] = {}
        for trajectory, reward in zip(rollout.trajectories, rewards, strict=True):
            path = trajectory.key.agent_path
            ids[path] = reward.trajectory_id
            # Parents come before their children: the id, a hash, is looked up and not made again.
            parent_id = ids.get(path.rpartition("/")[0]) or trajectory.parent_id
            row = _row(position, path, parent_id, trajectory, reward) | fixed[trajectory.key.agent]
            for name, column in columns.items():
                column.append(row[name])
    return table_of(REWARDS, columns)


def _rollouts(outcomes: Outcomes, main: str) -> Iterator[Rollout]:
    """Rollouts again from the agents' tables: the main trajectory first, then all under it by agent path."""
    under: dict[tuple[str, int], list[Trajectory]] = {}
    for agent, trajectories in outcomes.items():
        if agent != main:
            for one in trajectories:
                under.setdefault((one.key.query_id, one.key.rollout_index), []).append(one)
    heads: Sequence[Trajectory] = outcomes[main]
    for head in heads:
        place = (head.key.query_id, head.key.rollout_index)
        rest = sorted(under.get(place, ()), key=lambda one: one.key.call_order)
        yield Rollout(*place, (head, *rest))


def _sub_weights(reward: RewardConfig) -> SubWeights:
    return SubWeights(reward.format, reward.main_correct or 0.0, reward.expert or 0.0)


def _fixed(config: RunConfig, grades: Grades, agent: str) -> dict[str, Any]:
    """What is the same in every row of an agent."""
    weights = config.reward_of(agent)
    return {
        "agent": agent,
        "format_weight": weights.format,
        "correct_weight": weights.correct,
        "main_correct_weight": weights.main_correct,
        "expert_weight": weights.expert,
        "verifier": config.agents[agent].verifier if agent == config.main_agent else None,
        "judge_version": grades.judge_versions.get(agent),
    }


def _row(
    position: int, path: str, parent_id: str | None, trajectory: Trajectory, reward: TrajectoryReward
) -> dict[str, Any]:
    key = trajectory.key
    return {
        "trajectory_id": reward.trajectory_id,
        "parent_id": parent_id,
        "query_position": position,
        "query_id": key.query_id,
        "rollout_index": key.rollout_index,
        "agent_path": path,
        "call_index": key.call_index,
        "status": str(reward.status),
        "reason": reward.reason,
        "reward": reward.reward,
        "format": reward.format.value,
        "correct": reward.correct.value,
        "main_correct": reward.main_correct.value,
        "expert": reward.expert.value,
    }
