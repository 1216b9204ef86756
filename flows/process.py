"""Resources of a run in this process: a loop over iterations keeps them open, a flow run on its own opens its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.progress import ProgressBoard, watched
from infra.resources import RunResources, open_resources
from infra.store.runs import newest_config, open_store, require_run
from mgrpo_core.config import RunConfig

_open: dict[tuple[str, str], RunResources] = {}


@asynccontextmanager
async def keep_open(
    run: str, store: str, config: RunConfig, *, quiet: bool = False, accept_config_change: bool = False
) -> AsyncIterator[RunResources]:
    """Open a run, created if it is new, for every flow run of this process until the block ends."""
    progress = ProgressBoard(shown=watched() and not quiet)
    with open_resources(
        open_store(store), run, config, progress=progress, accept_config_change=accept_config_change
    ) as resources:
        _open[store, run] = resources
        try:
            yield resources
        finally:
            del _open[store, run]


@asynccontextmanager
async def resources_of(run: str, store: str) -> AsyncIterator[RunResources]:
    """What is open in this process, or the stored run with its newest config, opened for this block.

    Raises: StoreError if there is no such run.
    """
    if (store, run) in _open:
        yield _open[store, run]
        return
    stored = require_run(open_store(store), run)
    async with keep_open(run, store, newest_config(stored)) as resources:
        yield resources
