"""`mgrpo deploy`: the run into the store, pools, deployments and automations onto the Prefect server."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from prefect import get_client

from flows.deployments.dead_runs import AUTOMATIONS, put_automation
from flows.deployments.pools import put_pool
from flows.deployments.put import put_deployment
from flows.deployments.specs import Placement, deployment_specs, pool_specs
from infra.progress import ProgressBoard
from infra.resources import open_resources
from infra.store.runs import open_store
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Deployed:
    """One thing that `mgrpo deploy` looked at: its kind, its name, and what was done to it."""

    kind: str
    name: str
    done: str


async def deploy_run(
    config: RunConfig, placement: Placement, *, accept_config_change: bool = False
) -> AsyncIterator[Deployed]:
    """Put everything in place, and tell of each piece as it is done. Done again, it changes nothing.

    Raises:
        ConfigError: no Prefect server is named.
        StoreError, RunConflictError: the run cannot be created or continued with this config.
    """
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            "PREFECT_API_URL: not set, so there is no Prefect server to deploy to. After `mgrpo up`: "
            "source mgrpo-out/up/env; otherwise export PREFECT_API_URL=http://HOST:4200/api."
        )
    if not _shared(placement.store):
        raise ConfigError(
            f"store {placement.store!r}: a relative folder means another place for every worker. Give an absolute "
            "folder that all of them see, or a URL such as s3://bucket/runs."
        )
    files = open_store(placement.store, single_writer=config.execution.single_writer)
    with open_resources(
        files,
        placement.run,
        config,
        progress=ProgressBoard(shown=False),
        accept_config_change=accept_config_change,
    ) as resources:
        yield Deployed("run", resources.run.uri, f"config {config.sha256()[:12]}")
    async with get_client() as client:
        for pool in pool_specs(config):
            yield Deployed("work pool", pool.name, await put_pool(client, pool))
        for spec in deployment_specs(config, placement):
            yield Deployed("deployment", spec.full_name, await put_deployment(client, spec))
        for automation in AUTOMATIONS:
            yield Deployed("automation", automation.name, await put_automation(client, automation))


def _shared(store: str) -> bool:
    return "://" in store or Path(store).is_absolute()
