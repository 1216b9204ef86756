"""The rewards table: one row a trajectory, every component kept."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from infra.credit.grades import Grades, Outcomes
from infra.store.schemas import REWARDS
from infra.store.tables import table_of
from mgrpo_core.config import RewardConfig, RunConfig
from mgrpo_core.rewards.compose import MainWeights, SubWeights, TrajectoryReward, score_rollout
from mgrpo_core.trajectories import Rollout, Trajectory, TrajectoryKey

_Member = tuple[int, str, str | None, TrajectoryKey, TrajectoryReward]
"""Query position, agent path, parent's id, key and reward of a trajectory."""
_FIXED = ("format_weight", "correct_weight", "main_correct_weight", "expert_weight", "verifier", "judge_version")


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
    members: list[_Member] = []
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
            members.append((position, path, parent_id, trajectory.key, reward))
    return table_of(REWARDS, _columns(members, {agent: _fixed(config, grades, agent) for agent in config.agents}))


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
        "format_weight": weights.format,
        "correct_weight": weights.correct,
        "main_correct_weight": weights.main_correct,
        "expert_weight": weights.expert,
        "verifier": config.agents[agent].verifier if agent == config.main_agent else None,
        "judge_version": grades.judge_versions.get(agent),
    }


def _columns(members: Sequence[_Member], fixed: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column by column: several times as fast as a dict a row."""
    agents = [key.agent for *_, key, _ in members]
    rewards = [reward for *_, reward in members]
    return {
        "trajectory_id": [one.trajectory_id for one in rewards],
        "parent_id": [parent_id for _, _, parent_id, _, _ in members],
        "agent": agents,
        "query_position": [position for position, *_ in members],
        "query_id": [key.query_id for *_, key, _ in members],
        "rollout_index": [key.rollout_index for *_, key, _ in members],
        "agent_path": [path for _, path, *_ in members],
        "call_index": [key.call_index for *_, key, _ in members],
        "status": [str(one.status) for one in rewards],
        "reason": [one.reason for one in rewards],
        "reward": [one.reward for one in rewards],
        "format": [one.format.value for one in rewards],
        "correct": [one.correct.value for one in rewards],
        "main_correct": [one.main_correct.value for one in rewards],
        "expert": [one.expert.value for one in rewards],
        **{name: [fixed[agent][name] for agent in agents] for name in _FIXED},
    }
