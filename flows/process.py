"""Resources of a run in this process: a loop over iterations keeps them open, a flow run on its own opens its own."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from infra.progress import ProgressBoard, watched
from infra.resources import RunResources, open_resources
from infra.store.runs import newest_config, open_store, read_config, require_run
from infra.tracking.run_status import tracked
from infra.tracking.tracker import RunIdentity
from mgrpo_core.config import RunConfig

_open: dict[tuple[str, str], RunResources] = {}


@asynccontextmanager
async def keep_open(
    run: str, store: str, config: RunConfig, *, quiet: bool = False, accept_config_change: bool = False
) -> AsyncIterator[RunResources]:
    """Open a run, created if it is new, for every flow run of this process until the block ends."""
    progress = ProgressBoard(shown=watched() and not quiet)
    files = open_store(store, single_writer=config.execution.single_writer)
    with open_resources(files, run, config, progress=progress, accept_config_change=accept_config_change) as resources:
        _open[store, run] = resources
        try:
            yield resources
        finally:
            del _open[store, run]


@asynccontextmanager
async def resources_of(run: str, store: str, config: str | None = None) -> AsyncIterator[RunResources]:
    """What is open in this process, or the stored run, opened for this block.

    Args:
        run: its name.
        store: where it is.
        config: sha256 of the stored config to open it with; None = the newest iteration's.

    Raises: StoreError if there is no such run, TableIntegrityError if it has no such config.
    """
    if (store, run) in _open:
        yield _open[store, run]
        return
    async with keep_open(run, store, stored_config(run, store, config)) as resources:
        with tracked_run(resources):
            yield resources


def stored_config(run: str, store: str, sha256: str | None = None) -> RunConfig:
    """One of a stored run's configs; None = the newest iteration's.

    Raises: StoreError if there is no such run, TableIntegrityError if it has no such config.
    """
    stored = require_run(open_store(store), run)
    return read_config(stored, sha256) if sha256 else newest_config(stored)


@contextmanager
def tracked_run(resources: RunResources) -> Iterator[None]:
    """The run's MLflow status is this process's fate."""
    identity = RunIdentity(resources.run.name, resources.files.url)
    with tracked(resources.tracker, identity, resources.config.model_dump(mode="json")):
        yield
