"""From settings to the programs that fulfil them, and to the environment of those who use them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from infra.deploy.local.extra import package_folder
from infra.deploy.local.home import LocalHome, Running, make_private_folder
from infra.deploy.local.mlflow_server import mlflow_folder, mlflow_program, mlflow_url
from infra.deploy.local.ports import needs_postgres
from infra.deploy.local.postgres_server import LocalPostgres
from infra.deploy.local.prefect_server import api_url, prefect_folder, server_program, worker_program
from infra.deploy.local.program import Program
from infra.deploy.local.s3_server import LocalS3
from infra.deploy.settings import STORE

_DATABASE, _SERVER, _S3, _MLFLOW, _WORKERS = 0, 1, 0, 1, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Programs in the order of their start."""

    programs: tuple[Program, ...]
    environment: dict[str, str]
    remarks: tuple[str, ...]
    creations: tuple[Callable[[], None], ...]
    removals: tuple[Callable[[], None], ...]

    def create(self) -> None:
        """Make what the programs expect to find: a database cluster, accounts, folders."""
        for creation in self.creations:
            creation()

    def remove(self) -> None:
        """Remove what stopped programs left lying about outside of the home."""
        for removal in self.removals:
            removal()

    def steps(self) -> list[list[Program]]:
        """Programs that start together, step by step."""
        steps = sorted({program.step for program in self.programs})
        return [[program for program in self.programs if program.step == step] for step in steps]


def plan_services(home: LocalHome, running: Running) -> Plan:
    """What `running` consists of. Raises ConfigError if the extra `local` is not installed."""
    settings, ports = running.settings, running.settings.ports
    package_folder("supervisor", "what starts the services and keeps them running")
    programs: list[Program] = []
    environment: dict[str, str] = {}
    remarks: list[str] = []
    creations: list[Callable[[], None]] = []
    removals: list[Callable[[], None]] = []
    if "server" in settings.services:
        database_url = None
        if needs_postgres(settings):
            postgres = LocalPostgres(home)
            creations.append(postgres.create)
            programs.append(postgres.program(ports.postgres, step=_DATABASE))
            database_url = postgres.url(ports.postgres)
            remarks += postgres.remarks
        creations.append(partial(make_private_folder, prefect_folder(home)))
        programs.append(server_program(home, ports.server, database_url, step=_SERVER))
        environment["PREFECT_API_URL"] = api_url(ports.server)
    if "s3" in settings.services:
        s3 = LocalS3(home)
        creations.append(s3.create)
        removals.append(partial(s3.remove_sockets, ports))
        programs.append(s3.program(running, step=_S3))
        environment |= {**s3.environment(ports.s3), "MGRPO_STORE": STORE}
    if "mlflow" in settings.services:
        creations.append(partial(make_private_folder, mlflow_folder(home)))
        programs.append(mlflow_program(home, ports.mlflow, step=_MLFLOW))
        environment["MLFLOW_TRACKING_URI"] = mlflow_url(ports.mlflow)
    programs += [worker_program(home, ports.server, pool, environment, step=_WORKERS) for pool in settings.pools]
    return Plan(tuple(programs), environment, tuple(remarks), tuple(creations), tuple(removals))
