"""Stages: the main agent's rollouts, and each sub-agent's invocations, side by side over one delegation board."""

import asyncio
from collections.abc import Callable

from infra.resources import RunResources
from infra.store.staging import stage_group, staged_positions
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.trajectories import Query, Rollout, Trajectory
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.work_progress import WorkProgress


class IterationRollouts:
    """The rollout stages of one iteration in one process, and how far they are. A plain class: see RunResources."""

    def __init__(self, resources: RunResources, at: IterationRef) -> None:
        self._resources = resources
        self._at = at
        config = resources.config
        staged = staged_positions(resources.files, at.run, at.iteration)
        queries = resources.queries_at(at.query_indices)
        self._position = {query.query_id: position for position, query in enumerate(queries)}
        self.missing = [query for position, query in enumerate(queries) if position not in staged]
        plan = RolloutPlan(
            run=at.run,
            iteration=at.iteration,
            seed=config.seed,
            rollouts_per_query=config.rollout.rollouts_per_query,
            concurrency=config.rollout.concurrency,
            reply_deadline_s=config.rollout.reply_deadline_s,
        )
        self._watchers: dict[str, tuple[Callable[[int], None], ...]] = {}
        self._done: dict[str, int] = {}
        self.stages = RolloutStages(
            resources.team,
            plan,
            clients=resources.clients,
            tokenizers=resources.tokenizers,  # type: ignore[arg-type]
            on_trajectory=self._count,
        )

    def watch(self, agent: str, *watchers: Callable[[int], None]) -> None:
        """Tell them, with each trajectory of the agent that ends, how many there are."""
        self._watchers[agent] = watchers

    async def stage(self, query: Query, rollouts: tuple[Rollout, ...]) -> None:
        """Keep a finished group."""
        position = self._position[query.query_id]
        at = self._at
        await asyncio.to_thread(stage_group, self._resources.files, at.run, at.iteration, position, rollouts)

    def _count(self, trajectory: Trajectory) -> None:
        agent = trajectory.key.agent
        self._done[agent] = self._done.get(agent, 0) + 1
        for tell in self._watchers.get(agent, ()):
            tell(self._done[agent])


@stage
async def main_rollout(resources: RunResources, rollouts: IterationRollouts) -> int:
    """Roll out every query that is not staged yet, K times; stage each group as it finishes. Returns groups made."""
    main = resources.config.main_agent
    total = len(rollouts.missing) * resources.config.rollout.rollouts_per_query
    with resources.progress.bar(f"rollouts · {main}", total, "rollouts") as bar:
        async with WorkProgress("Rollouts", "rollouts") as artifact:
            rollouts.watch(main, bar.move, lambda done: artifact.move(done, total))
            await rollouts.stages.run_main(rollouts.missing, rollouts.stage)
    return len(rollouts.missing)


@stage(task_run_name="sub_agent_invocation-{agent}")
async def sub_agent_invocation(resources: RunResources, rollouts: IterationRollouts, agent: str) -> None:
    """Serve a sub-agent's invocations until the main stage has ended."""
    await rollouts.stages.serve(agent, resources.config.agents[agent].concurrency)
