"""Automations that mark runs whose process is gone: a killed process cannot say that it is.

A worker reports the death of a process that it started. When both are killed nobody is left, and the run would stay as
it was for ever: Running, or on its way to a process that never came. The server then misses what should have followed.
"""

from dataclasses import dataclass
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.deployments.specs import TAGS
from infra.deploy.settings import HEARTBEAT_S

SILENCE_S = 3 * HEARTBEAT_S
"""Three heartbeats missed in a row: one or two are lost on a busy machine."""
SUBMIT_S = 180
"""A worker that has taken a run starts its process within seconds."""
START_S = 1800
"""A pod may wait for its node, and a node for its image."""


@dataclass(frozen=True, slots=True)
class DeadRuns:
    """Runs of which nothing is heard for `within_s` after one of these events, and what is said of them."""

    name: str
    after: tuple[str, ...]
    within_s: int
    message: str


AUTOMATIONS = (
    DeadRuns(
        "mgrpo: mark dead runs as crashed",
        ("Running", "heartbeat"),  # it may die before its first heartbeat arrives
        SILENCE_S,
        f"No heartbeat for {SILENCE_S} s: its process is gone.",
    ),
    DeadRuns(
        "mgrpo: mark runs as crashed that a worker took and never started",
        ("Pending", "Submitting"),
        SUBMIT_S,
        f"Its worker took it and did not start it within {SUBMIT_S} s: the worker is gone.",
    ),
    DeadRuns(
        "mgrpo: mark runs as crashed whose process never came up",
        ("InfrastructurePending",),
        START_S,
        f"Its process or pod did not come up within {START_S} s.",
    ),
)


async def put_automation(client: PrefectClient, spec: DeadRuns) -> str:
    """Create the automation where it is missing or watches for something else; returns what was done."""
    wanted = _automation(spec)
    found = await client.read_automations_by_name(spec.name)
    if found:
        if _watches_for(found[0].trigger) == _watches_for(wanted.trigger):
            return "unchanged"
        await client.delete_automation(found[0].id)
    await wanted.acreate()
    return "updated" if found else "created"


def _watches_for(trigger: object) -> object:
    assert isinstance(trigger, EventTrigger), "ours are of this kind"
    return trigger.after, trigger.within, trigger.match_related


def _automation(spec: DeadRuns) -> Automation:
    return Automation(
        name=spec.name,
        description=spec.message,
        trigger=EventTrigger(
            after={f"prefect.flow-run.{event}" for event in spec.after},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            # Ours only: with Prefect's default of 180 s between heartbeats others would be taken for dead.
            match_related=ResourceSpecification(
                {"prefect.resource.role": ["tag"], "prefect.resource.id": [f"prefect.tag.{tag}" for tag in TAGS]}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=spec.within_s),
        ),
        actions=[ChangeFlowRunState(name=None, state=StateType.CRASHED, message=spec.message, force=False)],
    )
