"""What Prefect costs on PostgreSQL with the settings that mgrpo ships: a stage, an iteration, and what is left of it.

    make bench BENCH=tests/benchmarks/test_orchestration.py

`MGRPO_ITERATIONS=200` runs that many empty iterations in a row and prints rows, size and memory along the way.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest
from prefect import get_client
from prefect.deployments.flow_runs import arun_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.deploy.local.postgres_server import LocalPostgres
from infra.deploy.local.services import Services, local_services
from infra.deploy.local.settings import LocalSettings, Ports
from infra.deploy.settings import PREFECT_RUN
from tests.benchmarks.empty_iteration import STAGES, stages_alone

ROOT = Path(__file__).parents[2]
POOLS = {
    "empty-iteration/bench": "mgrpo-cpu",
    "empty-update/main": "mgrpo-gpu-main",
    "empty-update/sub": "mgrpo-gpu-sub",
}
ITERATIONS = int(os.environ.get("MGRPO_ITERATIONS", "3"))

pytestmark = pytest.mark.timeout(300 + 60 * ITERATIONS)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    home = Path(tempfile.mkdtemp(prefix="mgrpo-bench-"))
    home.chmod(0o755)
    settings = LocalSettings(services=("server",), pools=tuple(POOLS.values()), ports=Ports(0, 0, 0, 0))
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(local_services(home / "up", settings))
        stack.enter_context(temporary_settings({PREFECT_API_URL: running.environment["PREFECT_API_URL"]}))
        asyncio.run(_deploy())
        yield running
    shutil.rmtree(home, ignore_errors=True)


async def _deploy() -> None:
    from tests.benchmarks import empty_iteration

    flows = {"empty-iteration": empty_iteration.empty_iteration, "empty-update": empty_iteration.empty_update}
    async with get_client() as client:
        for full_name, pool in POOLS.items():
            flow_name, name = full_name.split("/")
            flow = flows[flow_name]
            await client.create_deployment(
                flow_id=await client.create_flow(flow),
                name=name,
                entrypoint=f"tests.benchmarks.empty_iteration.{flow.fn.__name__}",
                work_pool_name=pool,
                job_variables={"env": {**PREFECT_RUN, "PYTHONPATH": str(ROOT)}},
                pull_steps=[],
                enforce_parameter_schema=False,
                parameter_openapi_schema={"type": "object", "properties": {}},
            )


async def _iteration() -> None:
    """From `deployment run` to Completed."""
    async with get_client() as client:
        parameters = {"key": uuid.uuid4().hex}
        run = await arun_deployment("empty-iteration/bench", client=client, parameters=parameters, timeout=0)
        while True:
            state = (await client.read_flow_run(run.id)).state
            if state is not None and state.is_final():
                assert state.is_completed(), state
                return
            await asyncio.sleep(0.2)


def test_an_empty_iteration_with_two_child_deployments(benchmark, services: Services) -> None:
    benchmark.pedantic(lambda: asyncio.run(_iteration()), rounds=3, warmup_rounds=1)


def test_a_stage_task(benchmark, services: Services) -> None:
    count = 200
    benchmark.pedantic(lambda: asyncio.run(stages_alone(count)), rounds=3, warmup_rounds=1)
    benchmark.extra_info["milliseconds a stage, its flow included"] = 1000 * benchmark.stats.stats.median / count


def test_what_an_iteration_leaves_behind(benchmark, services: Services) -> None:
    """Rows and bytes in the database, the server's CPU and memory."""
    asyncio.run(_iteration())
    time.sleep(5)
    before = _server(services) | asyncio.run(_database(services))
    trail = [before]

    def many() -> None:
        for number in range(ITERATIONS):
            asyncio.run(_iteration())
            if (number + 1) % max(1, ITERATIONS // 5) == 0:
                trail.append(_server(services) | asyncio.run(_database(services)))
                print(number + 1, trail[-1], flush=True)

    benchmark.pedantic(many, rounds=1)
    time.sleep(5)
    after = _server(services) | asyncio.run(_database(services))
    each = {name: round((after[name] - before[name]) / ITERATIONS, 3) for name in after if name in before}
    benchmark.extra_info["an iteration"] = each
    print("an iteration:", each, "stages:", len(STAGES) + 2)


def _server(services: Services) -> dict[str, float]:
    pid = services.pid("server")
    assert pid is not None
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "server CPU s": sum(sum(one.cpu_times()[:2]) for one in family),
        "server MB": sum(one.memory_info().rss for one in family) / 1e6,
    }


async def _database(services: Services) -> dict[str, float]:
    url = LocalPostgres(services.home).url(services.settings.ports.postgres)
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        tables = await connection.fetch("select relname from pg_stat_user_tables")
        rows = {name: await connection.fetchval(f'select count(*) from "{name}"') for (name,) in tables}
        size = await connection.fetchval("select pg_database_size(current_database())")
    finally:
        await connection.close()
    most = sorted(rows, key=lambda name: -rows[name])[:6]
    return {"rows": sum(rows.values()), "database MB": size / 1e6} | {f"rows of {name}": rows[name] for name in most}
