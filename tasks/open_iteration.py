"""Stage: which iteration comes next, on which queries, from which policy versions."""

from collections.abc import Sequence

from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.runs import policy_versions, resume_point
from infra.store.schemas import QUERIES
from infra.store.tables import table_of, write_table
from mgrpo_core.data_order import DataCursor, next_batch
from mgrpo_core.errors import ConfigError
from mgrpo_core.trajectories import Query
from tasks.iteration_ref import IterationRef
from tasks.logs import stage_logger
from tasks.stage import stage


@stage
async def open_iteration(resources: RunResources, iteration: int | None) -> IterationRef:
    """Verify where the run stands, draw the iteration's queries, and have the engines serve its versions.

    Args:
        resources: of the run.
        iteration: which one is wanted; None = the next.

    Raises:
        ConfigError: it is not the next one. A committed iteration is replayed, not run again.
    """
    config, run = resources.config, resources.run
    resume = resume_point(run)
    for warning in resume.warnings:
        stage_logger().warning(warning)
    if iteration is not None and iteration != resume.iteration:
        raise ConfigError(
            f"iteration {iteration} of run {run.name!r} was asked for, but the next one is {resume.iteration}. "
            f"Leave the iteration out to continue, or give {resume.iteration}."
        )
    newest = resume.newest
    batch = next_batch(
        newest.manifest.cursor if newest else DataCursor(),
        len(resources.queries),
        config.rollout.queries_per_iteration,
        config.seed,
        shuffle=config.data.shuffle,
    )
    queries = resources.queries_at(batch.index_Q)
    at = IterationRef(
        run=run.name,
        iteration=resume.iteration,
        queries=_write_queries(resources, resume.iteration, queries, batch.epoch),
        versions=policy_versions(config, newest),
        parent_sha256=newest.sha256 if newest else None,
        query_indices=batch.index_Q,
        epoch=batch.epoch,
        cursor=batch.after,
    )
    resources.serve(at.versions)
    return at


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
