"""Work pools on the server: made if missing; of an existing one only a missing limit is set."""

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.deployments.specs import PoolSpec


async def put_pool(client: PrefectClient, spec: PoolSpec) -> str:
    """Make the pool what it should be; returns what was done, in a word or two.

    A pool that exists keeps its type and template: it may be a Kubernetes pool that somebody set up for its GPUs.
    """
    try:
        there = await client.read_work_pool(spec.name)
    except ObjectNotFound:
        await client.create_work_pool(
            WorkPoolCreate(
                name=spec.name,
                type=ProcessWorker.type,
                base_job_template=ProcessWorker.get_default_base_job_template(),
                concurrency_limit=spec.limit,
            )
        )
        return "created"
    if spec.limit is not None and there.concurrency_limit is None:
        await client.update_work_pool(spec.name, WorkPoolUpdate(concurrency_limit=spec.limit))
        return f"updated: limit {spec.limit}"
    return "unchanged"
