"""Deployments on the server: created, changed where they differ, left alone where they do not."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object

from flows.deployments.specs import SCHEDULE_SLUG, TAGS, DeploymentSpec, concurrency_options


async def put_deployment(client: PrefectClient, spec: DeploymentSpec) -> str:
    """Make the deployment what it should be; returns what was done, and what differed.

    A schedule that somebody switched on or off in the UI stays as it is.
    """
    flow: Flow[..., Any] = import_object(spec.entrypoint)
    there = await _find(client, spec.full_name)
    wanted = _wanted(spec, flow)
    changes = _changes(there, spec, wanted) if there else []
    if there and not changes:
        return "unchanged"
    await client.create_deployment(  # the server takes it as a change where the name is known
        flow_id=await client.create_flow(flow),
        name=spec.name,
        schedules=_schedules(spec, there),
        concurrency_limit=1 if spec.one_at_a_time else None,
        concurrency_options=ConcurrencyOptions(**concurrency_options()) if spec.one_at_a_time else None,
        enforce_parameter_schema=True,
        pull_steps=[],
        **wanted,
    )
    return "created" if there is None else f"updated: {', '.join(changes)}"


async def _find(client: PrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _wanted(spec: DeploymentSpec, flow: Flow[..., Any]) -> dict[str, Any]:
    """What is compared as it stands. Names are those of Prefect's client and of its answer alike."""
    return {
        "entrypoint": spec.entrypoint,
        "work_pool_name": spec.pool,
        "parameters": dict(spec.parameters),
        "job_variables": {"env": dict(spec.env)},
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "description": (flow.description or "").strip(),
        "tags": list(TAGS),
    }


def _changes(there: DeploymentResponse, spec: DeploymentSpec, wanted: dict[str, Any]) -> list[str]:
    changes = [name for name, value in wanted.items() if _plain(getattr(there, name)) != _plain(value)]
    limit = there.global_concurrency_limit.limit if there.global_concurrency_limit else None
    if limit != (1 if spec.one_at_a_time else None):
        changes.append("concurrency limit")
    crons = {one.slug: getattr(one.schedule, "cron", None) for one in there.schedules}
    if spec.schedule and crons.get(SCHEDULE_SLUG) != spec.schedule.cron:
        changes.append("schedule")
    return changes


def _plain(value: Any) -> Any:
    """Without keys that say nothing: Prefect's own command writes other ones of them into a schema."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if one not in (None, [], {})}
    return value


def _schedules(spec: DeploymentSpec, there: DeploymentResponse | None) -> list[DeploymentScheduleCreate]:
    """The spec's schedule; every other one that somebody added stays."""
    kept = [one for one in there.schedules if one.slug != SCHEDULE_SLUG] if there else []
    schedules = [
        DeploymentScheduleCreate(
            schedule=one.schedule,
            active=one.active,
            slug=one.slug,
            parameters=one.parameters,
            max_scheduled_runs=one.max_scheduled_runs,
        )
        for one in kept
    ]
    if spec.schedule:
        before = next((one for one in there.schedules if one.slug == SCHEDULE_SLUG), None) if there else None
        active = before.active if before else spec.schedule.active
        cron = CronSchedule(cron=spec.schedule.cron, timezone="UTC")
        schedules.append(DeploymentScheduleCreate(schedule=cron, active=active, slug=SCHEDULE_SLUG))
    return schedules
