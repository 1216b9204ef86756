"""The deployments of a config, as data: one definition for the Prefect server and for `prefect.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.deploy.settings import PREFECT_RUN, UPDATE_FLOW
from mgrpo_core.config import RunConfig

SCHEDULE_SLUG = "iterations"
DEFAULT_CRON = "0 * * * *"
TAGS = ("mgrpo",)

_START_GRACE_S = 120  # after which a run that never started gives its slot back


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the server starts runs by itself. UTC, so that no hour comes twice or not at all."""

    cron: str = DEFAULT_CRON
    active: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment as it should be.

    Attributes:
        flow: name of the flow.
        entrypoint: the flow's place in the installed package, so that no path of one machine is needed on another.
        one_at_a_time: a run that would start while another is under way is cancelled, not queued: an hourly schedule
            must not pile up behind a slow iteration.
        env: environment of its runs.
    """

    flow: str
    name: str
    entrypoint: str
    pool: str
    parameters: Mapping[str, Any]
    env: Mapping[str, str]
    one_at_a_time: bool = False
    schedule: Schedule | None = None

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A work pool as it should be; `limit` runs at a time, None = any number."""

    name: str
    limit: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a run lives, and what its deployments are called.

    Attributes:
        run: its name.
        store: URL of the store, without credentials.
        name: of the deployment `mgrpo/<name>`.
        schedule: of the iterations.
    """

    run: str
    store: str
    name: str = "iteration"
    schedule: Schedule = field(default_factory=Schedule)


def pool_specs(config: RunConfig) -> list[PoolSpec]:
    """The config's pools, each once: one update at a time on a GPU pool, any number of runs on the others."""
    limits: dict[str, int | None] = {config.update_pool_of(policy): 1 for policy in config.trained_policies}
    return [PoolSpec(name, limit) for name, limit in {config.execution.iteration_pool: None, **limits}.items()]


def deployment_specs(config: RunConfig, placement: Placement) -> list[DeploymentSpec]:
    """Iteration, evaluation, replay, training, and one update a trained policy."""
    place = {"run": placement.run, "store": placement.store}
    stored = {**place, "config": config.sha256()}
    pool, env = config.execution.iteration_pool, dict(PREFECT_RUN)
    evaluation = "benchmark" if placement.name == "iteration" else placement.name
    updates = [
        DeploymentSpec(
            UPDATE_FLOW,
            policy,
            "flows.policy_update.policy_update",
            config.update_pool_of(policy),
            {"store": placement.store},
            {**env, **config.execution.update_env.get(policy, {})},
        )
        for policy in config.trained_policies
    ]
    return [
        DeploymentSpec(
            "mgrpo",
            placement.name,
            "flows.iteration.iteration",
            pool,
            stored,
            env,
            one_at_a_time=True,
            schedule=placement.schedule,
        ),
        *updates,
        DeploymentSpec("mgrpo-evaluate", evaluation, "flows.evaluate.evaluate", pool, place, env),
        DeploymentSpec("mgrpo-replay", placement.name, "flows.replay.replay", pool, place, env),
        DeploymentSpec(
            "mgrpo-train",
            placement.run,
            "flows.train.train",
            pool,
            {**stored, "iterations": config.iterations},
            env,
            one_at_a_time=True,
        ),
    ]


def as_prefect_yaml(specs: list[DeploymentSpec]) -> dict[str, Any]:
    """The same deployments in the shape of `prefect.yaml`, for `prefect deploy --all`."""
    return {"name": "mgrpo", "pull": [], "deployments": [_yaml_entry(spec) for spec in specs]}


def concurrency_options() -> dict[str, Any]:
    """What `one_at_a_time` is to Prefect, beside the limit of 1."""
    return {"collision_strategy": "CANCEL_NEW", "grace_period_seconds": _START_GRACE_S}


def _yaml_entry(spec: DeploymentSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": spec.name,
        "entrypoint": spec.entrypoint,
        "tags": list(TAGS),
        "work_pool": {"name": spec.pool, "job_variables": {"env": dict(spec.env)}},
        "parameters": dict(spec.parameters),
    }
    if spec.one_at_a_time:
        entry["concurrency_limit"] = {"limit": 1, **concurrency_options()}
    if spec.schedule:
        schedule = spec.schedule
        entry["schedules"] = [
            {"cron": schedule.cron, "timezone": "UTC", "slug": SCHEDULE_SLUG, "active": schedule.active}
        ]
    return entry
