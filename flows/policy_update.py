"""The flow `mgrpo-policy-update`: one policy's update on the policy's own work pool.

Reads its policy's rows and the small tables from the store, writes version n+1 and its figures there, and nothing else.
"""

from prefect import flow
from prefect.runtime import flow_run

from infra.deploy.settings import UPDATE_FLOW
from infra.training.orders import UpdateOrder


def _flow_run_name() -> str:
    order = flow_run.parameters["order"]
    values = order if isinstance(order, dict) else {name: getattr(order, name) for name in UpdateOrder.__slots__}
    return f"{values['run']}-{values['iteration']:04d}-{values['policy']}"


@flow(name=UPDATE_FLOW, flow_run_name=_flow_run_name)
async def policy_update(order: UpdateOrder, store: str) -> dict[str, float]:
    """Make a policy's next version.

    Args:
        order: Which update: run, iteration, policy, and its tables by reference. Made by the iteration.
        store: Folder or fsspec URL of the store.
    """
    from tasks.run_update import run_update  # not before the run begins: see flows/iteration.py

    return await run_update(order, store)
