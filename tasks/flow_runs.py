"""What a stage tells the Prefect server of flow runs: a name, a cancellation, the end of one whose process is gone."""

import logging
from uuid import UUID

import httpx
from prefect import get_client
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed

from infra.store.leases import Owner

_UNREACHABLE = (httpx.HTTPError, PrefectException, OSError)
"""What a server that cannot answer raises: names and states are for people, and no iteration fails for want of them."""


def this_owner() -> Owner:
    """This process, as people know it: by its flow run's name."""
    return Owner.this_process(flow_run.name or "mgrpo", flow_run.id or "")


async def rename_flow_run(name: str) -> None:
    """Give the flow run of this stage its readable name, where it has another."""
    if flow_run.id is None or flow_run.name == name:
        return
    try:
        async with get_client() as client:
            await client.update_flow_run(flow_run.id, name=name)  # type: ignore[arg-type]
    except _UNREACHABLE as error:
        logging.getLogger("mgrpo").warning("The flow run keeps the name %s: %s", flow_run.name, error)


async def pass_on_cancellation(child: UUID) -> None:
    """Cancel a run of this stage where its own flow run is being cancelled, and not where this process merely stops.

    The hook `cancel_children` does it too, from a process of its own that first has to import Prefect: seconds later.
    """
    try:
        async with get_client() as client:
            state = (await client.read_flow_run(flow_run.id)).state  # type: ignore[arg-type]
            if state is not None and state.is_cancelling():
                await client.set_flow_run_state(
                    child, Cancelling(message="The iteration that started it is cancelled.")
                )
    except _UNREACHABLE as error:
        logging.getLogger("mgrpo").warning("Flow run %s is left to the cancellation hook: %s", child, error)


async def mark_crashed(owner: Owner, why: str) -> None:
    """Set the flow run of a dead process to Crashed: a killed process could not say so itself."""
    if not owner.flow_run:
        return
    try:
        async with get_client() as client:
            there = await client.read_flow_run(owner.flow_run)  # type: ignore[arg-type]
            if there.state is None or not there.state.is_final():
                await client.set_flow_run_state(there.id, Crashed(message=why), force=True)
    except ObjectNotFound:
        return  # of another server, or of a temporary one that is gone
    except _UNREACHABLE as error:
        logging.getLogger("mgrpo").warning("Flow run %s may stay Running: %s", owner.flow_run, error)
