"""Stage: what people see of a committed iteration."""

from collections.abc import Mapping

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.resources import RunResources
from infra.store.manifests import CommittedManifest
from tasks.logs import stage_logger


@task(cache_policy=NO_CACHE)
async def report_iteration(
    resources: RunResources, committed: CommittedManifest, metrics: Mapping[str, float], seconds: float
) -> None:
    """One line of the numbers that matter."""
    stage_logger().info("%s committed in %.1f s", committed.manifest.iteration, seconds)
