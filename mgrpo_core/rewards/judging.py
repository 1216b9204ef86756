"""An expert's opinion on sub-agents' work, without the reference answer."""

import asyncio
from collections.abc import Iterable

from mgrpo_core.rewards.component import Component, component_of, failed
from mgrpo_core.rollout.protocols import Judge, Report
from mgrpo_core.trajectories import Status, Trajectory


def report_of(trajectory: Trajectory) -> Report:
    """What a judge sees: task, reply, turns, and the replies that the policy saw, as they were cut."""
    observations = tuple(message.content for message in trajectory.messages if message.role == "tool")
    return Report(trajectory.task, trajectory.reply, trajectory.turns, observations)


async def judge_trajectories(
    trajectories: Iterable[Trajectory], judge: Judge, *, concurrency: int = 32, deadline_s: float = 600.0
) -> dict[str, Component]:
    """The judge's scores in [0, 1], by trajectory id.

    A trajectory that failed through no fault of the policy is not judged and is not in the result. Each is judged once,
    however often alignment copies it later. A judge that raises, or returns what is no number in [0, 1], has failed.

    Args:
        trajectories: of sub-agents.
        judge: any number of calls to it may be in flight up to the limit.
        concurrency: that limit.
        deadline_s: longest wait for one score, the judge's own retries included.
    Raises: ConfigError if the judge returns another type than a number or None.
    """
    limit = asyncio.Semaphore(concurrency)
    judged: dict[str, Component] = {}

    async def one(trajectory: Trajectory) -> None:
        async with limit:
            judged[trajectory.trajectory_id] = await _judged(trajectory, judge, deadline_s)

    try:
        async with asyncio.TaskGroup() as group:
            for trajectory in trajectories:
                if trajectory.status is not Status.INFRA_FAILED:
                    group.create_task(one(trajectory), name=trajectory.trajectory_id)
    except BaseExceptionGroup as broken:
        raise broken.exceptions[0] from broken
    return judged


async def _judged(trajectory: Trajectory, judge: Judge, deadline_s: float) -> Component:
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            returned = await judge.score(report_of(trajectory))
    except Exception as error:  # a judge is a service: what it raises is its failure, never a score
        reason = f"no score within {deadline_s:g} s" if deadline.expired() else repr(error)
        return failed(f"judge {judge.version}: {reason}")
    return component_of(returned, f"judge {judge.version}", unit_interval=True)
