"""What graders say of an iteration's outcomes: correctness of each answer, the expert's opinion of each invocation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgrpo_core.config import RunConfig
from mgrpo_core.rewards.component import Component
from mgrpo_core.rewards.judging import judge_trajectories
from mgrpo_core.rewards.verifiers import Verifier, correctness
from mgrpo_core.rollout.protocols import Judge
from mgrpo_core.trajectories import Query, Trajectory

Outcomes = Mapping[str, Sequence[Trajectory]]
"""Trajectories by agent, in the order of their tables; tokens are not looked at."""


@dataclass(frozen=True, slots=True)
class Grades:
    """Graded components by trajectory id.

    Attributes:
        corrects: of main trajectories, every one.
        experts: of sub-agents' trajectories; one that is missing was never graded.
        judge_versions: of the judge that gave them, by agent.
    """

    corrects: Mapping[str, Component]
    experts: Mapping[str, Component]
    judge_versions: Mapping[str, str]


async def grade(
    config: RunConfig, verifier: Verifier, judges: Mapping[str, Judge], queries: Sequence[Query], outcomes: Outcomes
) -> Grades:
    """Ask the verifier about every answer, and each agent's judge about its invocations."""
    experts: dict[str, Component] = {}
    for agent, judge in judges.items():
        experts |= await judge_trajectories(outcomes[agent], judge)
    return Grades(
        corrects_of(config, verifier, queries, outcomes[config.main_agent]),
        experts,
        {agent: judge.version for agent, judge in judges.items()},
    )


def corrects_of(
    config: RunConfig, verifier: Verifier, queries: Sequence[Query], mains: Sequence[Trajectory]
) -> dict[str, Component]:
    """Correctness of the main trajectories' answers."""
    name = config.agents[config.main_agent].verifier
    by_id = {query.query_id: query for query in queries}
    return {one.trajectory_id: correctness(verifier, one.reply, by_id[one.key.query_id], name=name) for one in mains}
