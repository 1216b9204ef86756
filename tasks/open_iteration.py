"""Stage: which iteration comes next, on which queries, from which policy versions; and nobody else computes it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.leases import Lease, take_lease
from infra.store.manifests import CommittedManifest, is_committed
from infra.store.runs import policy_versions, resume_point
from infra.store.schemas import QUERIES
from infra.store.tables import table_of, write_table
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import ConfigError, IterationTakenError
from mgrpo_core.trajectories import Query
from tasks.flow_runs import mark_crashed, rename_flow_run, this_owner
from tasks.iteration_ref import IterationRef
from tasks.logs import stage_logger
from tasks.stage import stage


@asynccontextmanager
async def opened(resources: RunResources, iteration: int | None) -> AsyncIterator[IterationRef]:
    """The iteration, with its lease held until the block ends."""
    try:
        yield await open_iteration(resources, iteration)
    finally:
        if resources.lease is not None:
            await asyncio.to_thread(resources.lease.release)
            resources.lease = None


@stage
async def open_iteration(resources: RunResources, iteration: int | None) -> IterationRef:
    """Verify where the run stands, take the iteration's lease, draw its queries, have the engines serve its versions.

    Args:
        resources: of the run.
        iteration: which one is wanted; None = the next.

    Raises:
        ConfigError: it is not the next one. A committed iteration is replayed, not run again.
        IterationTakenError: another live process computes it.
    """
    run = resources.run
    resume = resume_point(run)
    for warning in resume.warnings:
        stage_logger().warning(warning)
    if iteration is not None and iteration != resume.iteration:
        raise ConfigError(
            f"iteration {iteration} of run {run.name!r} was asked for, but the next one is {resume.iteration}. "
            f"Leave the iteration out to continue, or give {resume.iteration}."
        )
    await rename_flow_run(f"{run.name}-{resume.iteration:04d}")
    resources.lease = await _lease(resources, resume.iteration)
    at = _drawn(resources, resume.iteration, resume.newest)
    await asyncio.to_thread(resources.serve, at.versions)  # servers may take a minute to start
    return at


async def _lease(resources: RunResources, number: int) -> Lease:
    run = resources.run
    lease = await asyncio.to_thread(
        take_lease, run.files, run.name, number, this_owner(), on_wait=stage_logger().warning
    )
    if lease.taken_from is not None:
        stage_logger().warning("Iteration %s is taken over from %s, which is dead.", number, lease.taken_from)
        await mark_crashed(lease.taken_from, f"Its process is gone; {lease.owner} continues the iteration.")
    if is_committed(run.files, run.name, number):  # between the look and the lease
        lease.release()
        raise IterationTakenError(
            f"iteration {number} of run {run.name!r} was committed by another process meanwhile. Start again to "
            "compute the next one."
        )
    return lease


def _drawn(resources: RunResources, number: int, newest: CommittedManifest | None) -> IterationRef:
    config, run = resources.config, resources.run
    batch = resources.next_batch(newest.manifest.cursor if newest else DataCursor())
    queries = resources.queries_at(batch.index_Q)
    return IterationRef(
        run=run.name,
        iteration=number,
        queries=_write_queries(resources, number, queries, batch.epoch),
        versions=policy_versions(config, newest),
        parent_sha256=newest.sha256 if newest else None,
        query_indices=batch.index_Q,
        epoch=batch.epoch,
        cursor=batch.after,
    )


def _write_queries(resources: RunResources, iteration: int, queries: Sequence[Query], epoch: int) -> FileRef:
    columns = {
        "position": range(len(queries)),
        "query_id": [query.query_id for query in queries],
        "question": [query.question for query in queries],
        "answers": [list(query.answers) for query in queries],
        "metadata_json": [query.metadata_json for query in queries],
        "epoch": [epoch] * len(queries),
    }
    path = layout.table_file(resources.run.name, iteration, "queries")
    return write_table(resources.files, path, QUERIES, table_of(QUERIES, columns))
