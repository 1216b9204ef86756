"""Stages: the main agent's rollouts, and each sub-agent's invocations, side by side over one delegation board."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from infra.resources import RunResources
from infra.store.staging import stage_group, staged_groups
from mgrpo_core.config import RunConfig
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.trajectories import Query, Rollout, Trajectory
from tasks.logs import stage_logger
from tasks.stage import stage
from tasks.work_progress import WorkProgress


class IterationRollouts:
    """The rollout stages of one iteration in one process, and how far they are. A plain class: see RunResources."""

    def __init__(
        self, resources: RunResources, iteration: int, query_indices: Sequence[int], versions: Mapping[str, int]
    ) -> None:
        """Take what is staged already, unless it was sampled too long ago.

        Args:
            resources: of the run; its engines hold versions no newer than `versions`.
            iteration: its number.
            query_indices: places of its queries in the dataset, in order.
            versions: of the policies that will be trained on them.
        """
        self._resources = resources
        self._iteration = iteration
        config, run = resources.config, resources.run.name
        self.label = f"{run}-{iteration:04d}"
        staged = staged_groups(resources.files, run, iteration)
        stale = {position for position, oldest in staged.items() if _is_stale(oldest, versions, config)}
        if stale:
            stage_logger().warning(
                "%s: %s staged groups are rolled out again: the weights that sampled them are more than %s versions "
                "behind (rollout.max_staleness).",
                self.label, len(stale), config.rollout.max_staleness,
            )  # fmt: skip
        queries = resources.queries_at(query_indices)
        self._position = {query.query_id: position for position, query in enumerate(queries)}
        kept = staged.keys() - stale
        self.missing = [query for position, query in enumerate(queries) if position not in kept]
        plan = RolloutPlan(
            run=run,
            iteration=iteration,
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
        position, resources = self._position[query.query_id], self._resources
        await asyncio.to_thread(stage_group, resources.files, resources.run.name, self._iteration, position, rollouts)

    def _count(self, trajectory: Trajectory) -> None:
        agent = trajectory.key.agent
        self._done[agent] = self._done.get(agent, 0) + 1
        for tell in self._watchers.get(agent, ()):
            tell(self._done[agent])


def _is_stale(oldest: Mapping[str, int], versions: Mapping[str, int], config: RunConfig) -> bool:
    return any(
        policy in versions and versions[policy] - version > config.rollout.max_staleness
        for policy, version in oldest.items()
    )


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
