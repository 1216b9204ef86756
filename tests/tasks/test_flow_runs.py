"""A cancelled iteration takes the runs that it started with it; one that merely stops leaves them."""

from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Running

from tasks.flow_runs import pass_on_cancellation


@flow
async def _iteration(cancelled: bool) -> UUID:
    async with get_client() as client:
        child = await client.create_flow_run(_update, state=Running())
        if cancelled:
            await client.set_flow_run_state(UUID(flow_run.id), Cancelling())
    await pass_on_cancellation(child.id)
    return child.id


@flow
async def _update() -> None:
    """Never begun: what counts is its state."""


@pytest.mark.parametrize(("cancelled", "state"), [(True, "Cancelling"), (False, "Running")])
async def test_the_runs_of_a_stage_are_cancelled_where_its_own_run_is_being_cancelled(prefect_server, cancelled, state):
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        child = await _iteration(cancelled)
        async with get_client() as client:
            found = (await client.read_flow_run(child)).state
    assert found is not None
    assert found.name == state
