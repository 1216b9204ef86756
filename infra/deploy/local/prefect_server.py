"""The Prefect server and its workers as local processes. Spoken to over its REST API: infra does not import Prefect."""

import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from infra.deploy.local import http_calls
from infra.deploy.local.home import LocalHome
from infra.deploy.local.ports import HOST
from infra.deploy.local.program import Program
from infra.deploy.settings import PREFECT_SERVER, PREFECT_WORKER

_WORKER_NAME = "mgrpo-up"


def server_url(port: int) -> str:
    """For a browser."""
    return f"http://{HOST}:{port}"


def api_url(port: int) -> str:
    """For PREFECT_API_URL."""
    return f"{server_url(port)}/api"


def server_program(home: LocalHome, port: int, database_url: str | None, *, step: int) -> Program:
    """The server. `database_url` None = SQLite in the state folder."""
    folder = prefect_folder(home)
    database_url = database_url or f"sqlite+aiosqlite:///{folder / 'server.db'}"
    return Program(
        name="server",
        title="Prefect server",
        place=server_url(port),
        command=(sys.executable, "-m", "prefect", "--no-prompt", "server", "start"),
        environment={
            **PREFECT_SERVER,
            "PREFECT_HOME": str(folder),
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url,
            # What its pages call: they would take port 4200 otherwise.
            "PREFECT_SERVER_UI_API_URL": api_url(port),
        },
        directory=folder,
        answers=lambda _: http_calls.answers(f"{api_url(port)}/health"),
        deadline_s=180,  # the first start makes the tables
        step=step,
        stop_wait_s=15,
    )


def worker_name(pool: str) -> str:
    """Name of the pool's worker among the programs."""
    return f"worker-{pool}"


def worker_program(home: LocalHome, port: int, pool: str, environment: Mapping[str, str], *, step: int) -> Program:
    """The worker of one pool, which makes the pool if it is missing. Runs see `environment`, from the folder of now."""
    return Program(
        name=worker_name(pool),
        title=f"worker of pool {pool}",
        place=f"{server_url(port)}/work-pools/work-pool/{pool}",
        command=(
            sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool, "--type", "process",
            "--name", _WORKER_NAME, "--install-policy", "never",
        ),
        environment={**environment, **PREFECT_WORKER, "PREFECT_HOME": str(prefect_folder(home))},
        directory=Path.cwd(),
        answers=lambda since: _is_online(port, pool, since),
        deadline_s=120,
        step=step,
        stop_wait_s=15,  # for the runs that it has to end
    )  # fmt: skip


def _is_online(port: int, pool: str, since: float) -> bool:
    """Whether the worker said so after `since`: the server takes one that was just killed for online, too."""
    workers = http_calls.post_json(f"{api_url(port)}/work_pools/{pool}/workers/filter", {})
    return any(
        worker["name"] == _WORKER_NAME
        and worker["status"] == "ONLINE"
        and datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp() > since
        for worker in workers
    )


def prefect_folder(home: LocalHome) -> Path:
    """Of the server's and the workers' data."""
    return home.data / "prefect"
