"""Hook: when an iteration is cancelled, the updates that it started on other pools are cancelled with it.

On cancellation only. A crash of the iteration leaves its updates running: whoever continues it takes them up.
"""

from uuid import UUID

from prefect import Flow, State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling


def cancel_children(flow: Flow, flow_run: FlowRun, state: State) -> None:  # noqa: ARG001 (Prefect's signature)
    """Set every run below this one that is not final to Cancelling; their workers stop them."""
    with get_client(sync_client=True) as client:
        _cancel_below(client, flow_run.id)


def _cancel_below(client: SyncPrefectClient, parent: UUID) -> None:
    of_parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
    for child in client.read_flow_runs(flow_run_filter=of_parent):
        if child.state is None or not child.state.is_final():
            client.set_flow_run_state(child.id, Cancelling(message="The iteration that started it was cancelled."))
        _cancel_below(client, child.id)
