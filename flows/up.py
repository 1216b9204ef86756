"""What `mgrpo up` and `mgrpo down` do and print: services on this machine, in the foreground or left running."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

import typer

from flows.deployments.specs import pool_specs
from infra.deploy.local.home import LocalHome
from infra.deploy.local.program import Program
from infra.deploy.local.services import Listener, Services, find_services, start_services, stop_services
from infra.deploy.local.settings import SERVICES, Database, LocalSettings, Ports
from infra.deploy.local.supervisor import UNREACHABLE, ProgramState
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError, InfrastructureError

_WATCH_S = 1.0
_TITLE = 32  # widths of columns
_PLACE = 68


def pools_of(config: RunConfig) -> tuple[str, ...]:
    """Work pools that a run of `config` uses, each once."""
    return tuple(pool.name for pool in pool_specs(config))


def local_settings(
    config: RunConfig, *, only: str | None, workers: bool, database: Database, ports: tuple[int, int, int, int]
) -> LocalSettings:
    """What the command's options ask for.

    Args:
        config: its work pools get workers.
        only: names of services with commas between; None = all.
        workers: whether there are any; there are none without the Prefect server.
        database: of the Prefect server.
        ports: of the Prefect server, S3, MLflow and PostgreSQL.

    Raises: ConfigError for a service that does not exist.
    """
    names = SERVICES if only is None else tuple(name.strip() for name in only.split(","))
    if unknown := sorted(set(names) - set(SERVICES)):
        raise ConfigError(f"--only {only}: no such service: {', '.join(unknown)}. There are {', '.join(SERVICES)}.")
    return LocalSettings(
        services=tuple(service for service in SERVICES if service in names),
        database=database,
        pools=pools_of(config) if workers and "server" in names else (),
        ports=Ports(*ports),
    )


def start(home: Path, settings: LocalSettings, *, detach: bool) -> None:
    """Start the services; with `detach` leave them running, otherwise watch them until a signal, then stop all.

    Raises:
        ConfigError: nothing was started.
        InfrastructureError: a service does not come up; all are stopped again.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM; all are stopped.
    """
    place = LocalHome(home)
    with _signals_as_exit():
        if (services := _already_up(place, settings)) is not None:
            typer.echo(f"Already up, from {_short(place.folder)}.")
            for program in services.programs:
                typer.echo(f"  {program.title:<{_TITLE}} {program.place}")
            _tell_how_to_use(services)
            return
        began = time.monotonic()
        typer.echo(f"Starting; state and data in {_short(place.folder)}, logs in {_short(place.logs)}.")
        with _Progress() as progress:
            services = start_services(place, settings, progress)
        try:
            typer.echo(f"Up after {time.monotonic() - began:.0f} s.")
            _tell_how_to_use(services)
            if detach:
                typer.echo("Left running; `mgrpo down` stops them.")
                return
            typer.echo("Ctrl-C stops them.")
            _watch(services)
        except BaseException:
            typer.echo("Stopping.")
            services.stop_all()
            raise


def stop(home: Path) -> None:
    """Stop what runs from `home`, whoever started it."""
    place = LocalHome(home)
    if not place.folder.exists():
        typer.echo(f"Nothing is up: there is no {place.folder}.")
    elif stop_services(place):
        typer.echo(f"All stopped. Data stay in {place.data}.")
    else:
        typer.echo(f"Nothing is up from {place.folder}.")


def _already_up(place: LocalHome, settings: LocalSettings) -> Services | None:
    """The services, if what was asked for runs whole; None if it shall be started.

    Raises: ConfigError if they run, but not for these pools.
    """
    services = find_services(place)
    if services is None:
        return None
    if not services.are_whole():
        typer.echo("Something is up, but not all of it answers: stopping it first.")
        return None
    missing = [pool for pool in settings.pools if pool not in services.settings.pools]
    missing += [service for service in settings.services if service not in services.settings.services]
    if missing:
        raise ConfigError(
            f"{place.folder}: services are up, but not for {', '.join(missing)}. "
            "Stop them with `mgrpo down`, then start again."
        )
    return services


def _watch(services: Services) -> None:
    """Tell what restarts or gives up; return when the services were stopped from elsewhere.

    Raises: InfrastructureError if supervisord was killed; what it left is stopped.
    """
    before = services.supervisor.states()
    while True:
        time.sleep(_WATCH_S)
        try:
            after = services.supervisor.states()
        except UNREACHABLE:
            if services.stop_all():
                raise InfrastructureError(
                    "supervisord, which kept the services running, is gone; the others are stopped. Its log: "
                    f"{services.home.log_of('supervisord')}. `mgrpo up` starts all again."
                ) from None
            typer.echo("Stopped from elsewhere.")
            return
        for name, state in after.items():
            if news := _news(before[name], state):
                typer.echo(f"{name} {news}; its log: {_short(services.home.log_of(name))}", err=True)
        before = after


def _news(before: ProgramState, after: ProgramState) -> str | None:
    if after.state == "FATAL" and before.state != "FATAL":
        return "given up after several starts"
    if after.pid is not None and after.pid != before.pid:
        return "ended, and was started again"
    return None


class _Progress(Listener):
    """One line a program: begun when it is waited for, ended when it answers."""

    def __init__(self) -> None:
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            typer.echo()

    def waits_for(self, program: Program) -> None:
        typer.echo(f"  {program.title:<{_TITLE}} {program.place:<{_PLACE}} ", nl=False)
        self._begun = True

    def has_answered(self, program: Program, seconds: float) -> None:
        del program  # its line is the one begun
        typer.echo(f"{seconds:5.1f} s")
        self._begun = False


def _tell_how_to_use(services: Services) -> None:
    for remark in services.remarks:
        typer.echo(remark)
    typer.echo(f"source {_short(services.home.env_file)}")


def _short(path: Path) -> Path:
    """As one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Ctrl-C and SIGTERM become SystemExit; while that is under way, more of them change nothing.

    A shell script's `mgrpo up &` is started with SIGINT ignored; the handler ends that, for all that we start as well.
    """
    signalled = False

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        nonlocal signalled
        if not signalled:
            signalled = True
            raise SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
