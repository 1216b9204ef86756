"""Stage: rollouts of the next iterations, while this one's policies are updated; see `rollout.max_staleness`.

Their groups are staged where the iterations that they belong to look for them. So nothing else changes: an iteration
takes the groups that it finds, if the weights that sampled them are not too far behind, and rolls out the rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from infra.resources import RunResources
from mgrpo_core.trajectories import Query, Rollout, Status
from tasks.iteration_ref import IterationRef
from tasks.logs import stage_logger
from tasks.roll_out import IterationRollouts
from tasks.stage import stage


@asynccontextmanager
async def rolling_out_ahead(resources: RunResources, at: IterationRef) -> AsyncIterator[None]:
    """Roll out ahead for as long as the block runs. It ends when the groups that have begun are whole.

    Whatever fails here is a warning: the iteration that the rollouts are for makes them itself, and tells.
    """
    if not _numbers_ahead(resources, at):
        yield
        return
    updated = asyncio.Event()
    ahead = asyncio.create_task(roll_out_ahead(resources, at, updated))
    try:
        yield
        updated.set()
        try:
            await ahead
        except Exception as error:
            stage_logger().warning("Rollouts ahead of %s ended: %s: %s", at.label, type(error).__name__, error)
    finally:
        if not ahead.done():
            ahead.cancel()
            with suppress(asyncio.CancelledError):
                await ahead


@stage
async def roll_out_ahead(resources: RunResources, at: IterationRef, updated: asyncio.Event) -> int:
    """Roll out the queries of the iterations after `at`, in order, with the versions at hand; returns groups staged.

    Args:
        resources: of the run; its engines keep their versions meanwhile.
        at: the iteration whose policies are updated.
        updated: set when they are: then no further group begins.
    """
    cursor, made = at.cursor, 0
    for number in _numbers_ahead(resources, at):
        if updated.is_set():
            break
        batch = resources.next_batch(cursor)
        cursor = batch.after
        # Each update makes at most one version, so these groups will be as far behind as their iteration is ahead.
        rollouts = IterationRollouts(resources, number, batch.index_Q, at.versions)
        made += await _make(resources, rollouts, updated)
    return made


async def _make(resources: RunResources, rollouts: IterationRollouts, updated: asyncio.Event) -> int:
    config, made, lost = resources.config, 0, 0
    limits = {agent: config.agents[agent].concurrency for agent in rollouts.stages.sub_agents}
    total = len(rollouts.missing) * config.rollout.rollouts_per_query

    async def keep(query: Query, group: tuple[Rollout, ...]) -> None:
        nonlocal made, lost
        # What our side lost is tried once more in its own iteration, where it counts.
        if any(one.status == Status.INFRA_FAILED for rollout in group for one in rollout.trajectories):
            lost += 1
        else:
            await rollouts.stage(query, group)
            made += 1

    with resources.progress.bar(f"rollouts ahead · {config.main_agent}", total, "rollouts") as bar:
        rollouts.watch(config.main_agent, bar.move)
        await rollouts.stages.run(rollouts.missing, keep, limits, lambda: not updated.is_set())
    stage_logger().info("%s: %s groups rolled out ahead.", rollouts.label, made)
    if lost:
        stage_logger().warning(
            "%s: %s groups had infrastructure failures, and will be rolled out again.", rollouts.label, lost
        )
    return made


def _numbers_ahead(resources: RunResources, at: IterationRef) -> range:
    """Iterations to roll out for: none beyond those that the config asks for."""
    config = resources.config
    return range(at.iteration + 1, min(at.iteration + 1 + config.rollout.max_staleness, config.iterations))
