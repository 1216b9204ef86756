"""A Prefect deployment as people have it: server on PostgreSQL, S3, a worker a pool, and runs started over its API."""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments.flow_runs import arun_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.deploy.local.services import Services
from infra.store.files import StoreFiles
from infra.store.runs import open_store
from tests.flows.small_team import config_of, save_config, save_policies, save_queries
from tests.pools.stand_in_update import FOLDER

ROOT = Path(__file__).parents[2]
POOLS = ("mgrpo-cpu", "mgrpo-gpu-main", "mgrpo-gpu-sub")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Services, and a run of the small team deployed on them."""

    services: Services
    folder: Path
    run: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.services.environment}

    @property
    def store(self) -> str:
        return self.services.environment["MGRPO_STORE"]

    def files(self) -> StoreFiles:
        """The store, with the credentials of the services in this process's environment."""
        return open_store(self.store)

    def plan(self, what: str) -> Path:
        """The file that has updates held, failed or killed, while it exists."""
        return self.folder / what

    def noted(self, what: str) -> list[str]:
        file = self.folder / what
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def mgrpo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line."""
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )

    def ask(self, question: Callable[[PrefectClient], Awaitable[T]]) -> T:
        """Ask the server."""

        async def asked() -> T:
            async with get_client() as client:
                return await question(client)

        with temporary_settings({PREFECT_API_URL: self.services.environment["PREFECT_API_URL"]}):
            return asyncio.run(asked())

    def start(self, deployment: str = "mgrpo/iteration", **parameters: Any) -> UUID:
        """Start a run of a deployment; returns its id at once."""

        async def started(client: PrefectClient) -> UUID:
            place = {"run": self.run, "store": self.store}
            return (await arun_deployment(deployment, client=client, parameters=place | parameters, timeout=0)).id

        return self.ask(started)

    def flow_run(self, run: UUID) -> FlowRun:
        return self.ask(lambda client: client.read_flow_run(run))

    def children(self, run: UUID) -> list[FlowRun]:
        of_parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
        return self.ask(lambda client: client.read_flow_runs(flow_run_filter=of_parent))

    def state(self, run: UUID) -> State:
        state = self.flow_run(run).state
        assert state is not None
        return state

    def finished(self, run: UUID, seconds: float = 120) -> State:
        """The final state of a run."""
        self.until(lambda: self.state(run).is_final(), seconds, lambda: f"run {run} is {self.state(run)}")
        return self.state(run)

    def until(self, holds: Callable[[], bool], seconds: float, else_say: Callable[[], str] = str) -> float:
        """Wait until something holds; returns how long it took."""
        begun = time.monotonic()
        while not holds():
            if time.monotonic() - begun > seconds:
                raise TimeoutError(f"not within {seconds} s: {else_say()}")
            time.sleep(0.2)
        return time.monotonic() - begun

    def manifest(self, iteration: int) -> dict[str, Any]:
        return json.loads(self.files().read(f"{self.run}/iterations/{iteration:08d}/manifest.json"))

    def log(self, program: str) -> str:
        return self.services.home.log_of(program).read_text(encoding="utf-8", errors="replace")


def deployed(services: Services, folder: Path, **settings: Any) -> Cluster:
    """A new run of the small team on the services, its updates standing in for the real ones' deployments."""
    cluster = Cluster(services, folder, f"r-{uuid.uuid4().hex[:8]}")
    policies = save_policies(folder)
    config = config_of(policies, save_queries(folder / "queries.jsonl"))
    config["execution"] |= settings
    save_config(folder / "team.yaml", config)
    done = cluster.mgrpo("deploy", str(folder / "team.yaml"), "--run", cluster.run)
    assert done.returncode == 0, done.stderr
    cluster.ask(lambda client: _stand_in(client, folder))
    return cluster


async def _stand_in(client: PrefectClient, folder: Path) -> None:
    for policy in ("main", "sub"):
        there = await client.read_deployment_by_name(f"mgrpo-policy-update/{policy}")
        env = {**there.job_variables["env"], "PYTHONPATH": str(ROOT), FOLDER: str(folder)}
        change = DeploymentUpdate(entrypoint="tests.pools.stand_in_update.policy_update", job_variables={"env": env})
        await client.update_deployment(there.id, change)
