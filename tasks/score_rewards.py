"""Stage: format, correctness and the expert's opinion become one reward a trajectory, every part kept."""

from collections.abc import Iterator
from typing import Any

from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.schemas import REWARDS, TRAJECTORIES
from infra.store.tables import read_table, table_of, write_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of
from mgrpo_core.config import RewardConfig
from mgrpo_core.rewards.component import Component
from mgrpo_core.rewards.compose import MainWeights, SubWeights, TrajectoryReward, score_rollout
from mgrpo_core.rewards.judging import judge_trajectories
from mgrpo_core.rewards.verifiers import correctness
from mgrpo_core.trajectories import Rollout, Trajectory
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables


@stage
async def score_rewards(resources: RunResources, at: IterationRef, tables: TrajectoryTables) -> FileRef:
    """Score every trajectory once, without reading a token; write the rewards table."""
    config = resources.config
    by_agent = {agent: _outcomes(resources, tables, agent) for agent in config.agents}
    experts: dict[str, Component] = {}
    for agent, judge in resources.judges.items():
        experts |= await judge_trajectories(by_agent[agent], judge)

    verifier = config.agents[config.main_agent].verifier
    queries = resources.queries_at(at.query_indices)
    by_id = {query.query_id: (position, query) for position, query in enumerate(queries)}
    main = config.reward_of(config.main_agent)
    main_weights = MainWeights(main.format, main.correct or 0.0)
    sub_weights = {agent: _sub_weights(config.reward_of(agent)) for agent in config.sub_agents}
    rows: list[dict[str, Any]] = []
    for rollout in _rollouts(by_agent, config.main_agent):
        position, query = by_id[rollout.query_id]
        correct = correctness(resources.verifier, rollout.trajectories[0].reply, query, name=verifier)
        rewards = score_rollout(rollout, correct, experts, main_weights=main_weights, sub_weights=sub_weights)
        for trajectory, reward in zip(rollout.trajectories, rewards, strict=True):
            rows.append(_row(resources, position, trajectory, reward))
    columns = {name: [row[name] for row in rows] for name in REWARDS.columns.names}
    path = layout.table_file(at.run, at.iteration, "rewards")
    return write_table(resources.files, path, REWARDS, table_of(REWARDS, columns))


def _outcomes(resources: RunResources, tables: TrajectoryTables, agent: str) -> list[Trajectory]:
    return trajectories_of(read_table(resources.files, tables.paths(agent), TRAJECTORIES, OUTCOME_COLUMNS))


def _rollouts(by_agent: dict[str, list[Trajectory]], main: str) -> Iterator[Rollout]:
    """Rollouts again from the agents' tables: the main trajectory first, then all under it by agent path."""
    under: dict[tuple[str, int], list[Trajectory]] = {}
    for agent, trajectories in by_agent.items():
        if agent != main:
            for one in trajectories:
                under.setdefault((one.key.query_id, one.key.rollout_index), []).append(one)
    for head in by_agent[main]:
        place = (head.key.query_id, head.key.rollout_index)
        rest = sorted(under.get(place, ()), key=lambda one: one.key.call_order)
        yield Rollout(*place, (head, *rest))


def _sub_weights(reward: RewardConfig) -> SubWeights:
    return SubWeights(reward.format, reward.main_correct or 0.0, reward.expert or 0.0)


def _row(resources: RunResources, position: int, trajectory: Trajectory, reward: TrajectoryReward) -> dict[str, Any]:
    key, config = trajectory.key, resources.config
    weights = config.reward_of(key.agent)
    is_main = key.agent == config.main_agent
    judge = resources.judges.get(key.agent)
    return {
        "trajectory_id": reward.trajectory_id,
        "parent_id": trajectory.parent_id,
        "agent": key.agent,
        "query_position": position,
        "query_id": key.query_id,
        "rollout_index": key.rollout_index,
        "agent_path": key.agent_path,
        "call_index": key.call_index,
        "status": str(reward.status),
        "reason": reward.reason,
        "reward": reward.reward,
        "format": reward.format.value,
        "correct": reward.correct.value,
        "main_correct": reward.main_correct.value,
        "expert": reward.expert.value,
        "format_weight": weights.format,
        "correct_weight": weights.correct,
        "main_correct_weight": weights.main_correct,
        "expert_weight": weights.expert,
        "verifier": config.agents[key.agent].verifier if is_main else None,
        "judge_version": judge.version if judge else None,
    }
