"""The one task of `mgrpo-policy-update`: carry out an order, with progress and figures where people look."""

import asyncio
import json
import tempfile
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, open_store, read_config
from infra.training.policy_update import UpdateOrder, carry_out
from tasks.logs import stage_logger
from tasks.stoppable import stoppable
from tasks.work_progress import WorkProgress


@task(task_run_name="update_policy-{order.policy}", cache_policy=NO_CACHE)
async def run_update(order: UpdateOrder, store: str) -> dict[str, float]:
    """Make version n+1 of a policy, or find it made; return the update's figures."""
    files = open_store(store)
    config = await asyncio.to_thread(read_config, StoredRun(files, order.run), order.config_sha256)
    begun = time.perf_counter()
    label = f"{order.run}-{order.iteration:04d}, policy {order.policy}"
    async with WorkProgress(f"Update of {label}", "tokens") as progress:
        with tempfile.TemporaryDirectory(prefix="mgrpo-policies-") as cache:
            update = await stoppable(lambda move: carry_out(files, config, order, Path(cache), move), progress.move)
    figures = _figures(files, update.figures.path)
    seconds = time.perf_counter() - begun
    stage_logger().info(
        "%s: version %s -> %s in %.1f s. %s",
        label,
        update.step.from_version,
        update.step.to_version,
        seconds,
        ", ".join(f"{name} {value:.4g}" for name, value in figures.items()),
    )
    return figures


def _figures(files: StoreFiles, path: str) -> dict[str, float]:
    return {name: float(value) for name, value in json.loads(files.read(path))["figures"].items()}
