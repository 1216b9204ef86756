"""The automation that marks runs whose process is gone: a killed process cannot say that it is.

A worker reports the death of a process that it started. When both are killed nobody is left, and the run would stay
Running for ever; the server then misses its heartbeats.
"""

from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Posture
from prefect.events.schemas.events import ResourceSpecification

from infra.deploy.settings import HEARTBEAT_S

NAME = "mgrpo: mark dead runs as crashed"
SILENCE_S = 3 * HEARTBEAT_S
"""Three heartbeats missed in a row: one or two are lost on a busy machine."""


async def put_dead_run_automation(client: PrefectClient) -> str:
    """Create the automation where it is missing or of another silence; returns what was done."""
    wanted = _automation()
    found = await client.read_automations_by_name(NAME)
    if found:
        trigger = found[0].trigger
        if isinstance(trigger, EventTrigger) and trigger.within == wanted.trigger.within:  # type: ignore[union-attr]
            return "unchanged"
        await client.delete_automation(found[0].id)
    await wanted.acreate()
    return "updated" if found else "created"


def _automation() -> Automation:
    return Automation(
        name=NAME,
        description=f"A run that was heard of, and then not for {SILENCE_S} s, has no process any more.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE_S),
        ),
        actions=[
            ChangeFlowRunState(
                name=None,
                state=StateType.CRASHED,
                message=f"No heartbeat for {SILENCE_S} s: its process is gone.",
                force=False,
            )
        ],
    )
