"""The services of `mgrpo up`: start them in order, each when the one before answers; find them again; stop them all.

`with local_services(home, LocalSettings(pools=("mgrpo-cpu",))) as services: use(services.environment)`
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from infra.deploy.local.home import LocalHome, Running
from infra.deploy.local.leftovers import end_leftovers
from infra.deploy.local.plan import Plan, plan_services
from infra.deploy.local.ports import settle_ports
from infra.deploy.local.program import Program
from infra.deploy.local.settings import LocalSettings
from infra.deploy.local.supervisor import UNREACHABLE, Supervisor
from infra.deploy.local.undisturbed import undisturbed
from mgrpo_core.errors import InfrastructureError

_POLL_S = 0.1
_PATIENCE_S = 120.0
_LOG_LINES = 15
_STILL_TO_COME = (OSError, HTTPException, ValueError, KeyError, TypeError)


class Listener:
    """Hears how the start goes on. This one tells nobody."""

    def waits_for(self, program: Program) -> None:
        """The program has been started, or is about to be, and its answer is waited for."""

    def has_answered(self, program: Program, seconds: float) -> None:
        """It answers, so long after it was started."""


class Services:
    """Services that run."""

    def __init__(self, home: LocalHome, running: Running, plan: Plan, supervisor: Supervisor) -> None:
        self.home = home
        self.settings = running.settings
        self.programs = plan.programs
        self.environment = plan.environment
        """Variables for whoever uses the services; with secrets."""
        self.remarks = plan.remarks
        """For people: what is not where they would look for it."""
        self.supervisor = supervisor

    def pid(self, name: str) -> int | None:
        """Process id of a program; None while it has none."""
        return self.supervisor.state(name).pid

    def kill(self, name: str, signal: int) -> None:
        """Send a signal to a program's process alone, and return at once. If that ends it, it is restarted."""
        pid = self.pid(name)
        if pid is None:
            raise InfrastructureError(f"{name}: does not run, so that it cannot be killed. Start it: start({name!r}).")
        os.kill(pid, signal)

    def stop(self, name: str) -> None:
        """Stop a program, and leave it stopped."""
        self.supervisor.stop([name])

    def start(self, name: str) -> None:
        """Start a program, and return when it answers. Raises InfrastructureError as `start_services` does."""
        self.supervisor.start(name)
        self.wait_for(name)

    def wait_for(self, name: str, *, other_than: int | None = None) -> None:
        """Return when the program answers.

        Args:
            name: of the program.
            other_than: id of a process that was killed: it may look alive for a moment.

        Raises: InfrastructureError if it is given up, or does not answer within its deadline.
        """
        program = next(program for program in self.programs if program.name == name)
        deadline = time.monotonic() + program.deadline_s
        while True:
            state = self.supervisor.state(name)
            if state.has_ended:
                raise self._failure(program, f"ended before it answered ({state.remark})")
            if state.pid not in {None, other_than} and _answers(program, state.started):
                return
            if time.monotonic() > deadline:
                raise self._failure(program, f"no answer at {program.place} within {program.deadline_s:.0f} s")
            time.sleep(_POLL_S)

    def stop_all(self) -> bool:
        """Stop everything; False if somebody else had done so."""
        with self.home.alone(patience_s=_PATIENCE_S):
            running = self.home.running()
            now = Supervisor.find(running) if running else None
            if running is None or (now and now.pid != self.supervisor.pid):
                return False
            return _stop(self.home)

    def are_whole(self) -> bool:
        """Whether every program runs and answers at this moment."""
        states = self.supervisor.states()
        return all(
            program.name in states
            and states[program.name].is_running
            and _answers(program, states[program.name].started)
            for program in self.programs
        )

    def _failure(self, program: Program, what: str) -> InfrastructureError:
        log = self.home.log_of(program.name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        end = "\n".join(f"  {line}" for line in lines[-_LOG_LINES:]) or "  (nothing)"
        return InfrastructureError(f"{program.title}: {what}. Its log, {log}, ends with:\n{end}")


def _answers(program: Program, started: float) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return program.answers(started)
    except (*_STILL_TO_COME, BotoCoreError, ClientError):
        return False


def find_services(home: LocalHome) -> Services | None:
    """What runs from `home`, whoever started it; None if no supervisord does."""
    running = home.running()
    supervisor = Supervisor.find(running) if running else None
    if running is None or supervisor is None:
        return None
    return Services(home, running, plan_services(home, running), supervisor)


def start_services(home: LocalHome, settings: LocalSettings, listener: Listener | None = None) -> Services:
    """Start what `settings` name; whatever an earlier start left in `home` is stopped first. All or nothing.

    Raises:
        ConfigError: a port is in use, a package is missing, a path cannot be used. Nothing was started.
        InfrastructureError: a service does not answer. All are stopped again.
    """
    listener = listener or Listener()
    with home.alone():
        _stop(home)
        running = home.new_running(settle_ports(settings))
        plan = plan_services(home, running)
        home.create()
        home.note_running(running)
        try:
            plan.create()
            home.write_env(plan.environment)
            supervisor = Supervisor.launch(home, running, plan.programs)
            services = Services(home, running, plan, supervisor)
            for step in plan.steps():
                began = time.monotonic()
                for program in step:
                    supervisor.start(program.name)
                for program in step:
                    listener.waits_for(program)
                    services.wait_for(program.name)
                    listener.has_answered(program, time.monotonic() - began)
        except BaseException:
            _stop(home)
            raise
    return services


def stop_services(home: LocalHome) -> bool:
    """Stop all that runs from `home`, also what nobody watches any more; whether there was anything."""
    with home.alone():
        return _stop(home)


def _stop(home: LocalHome) -> bool:
    with undisturbed():
        return _stop_now(home)


def _stop_now(home: LocalHome) -> bool:
    running = home.running()
    plan = plan_services(home, running) if running else None
    supervisor = Supervisor.find(running) if running else None
    if plan and supervisor:
        # Should it end meanwhile, its programs are among the leftovers.
        with contextlib.suppress(*UNREACHABLE):
            # Workers first, while the server still hears how their runs end; the database last.
            for step in reversed(plan.steps()):
                supervisor.stop(program.name for program in step)
            supervisor.shut_down()
    left = end_leftovers(home)
    if plan:
        plan.remove()
    home.forget_running()
    return supervisor is not None or left > 0


@contextmanager
def local_services(
    home: Path | str, settings: LocalSettings | None = None, listener: Listener | None = None
) -> Iterator[Services]:
    """Services for the time of a `with`; raises as `start_services` does."""
    place = LocalHome(home)
    services = start_services(place, settings or LocalSettings(), listener)
    try:
        yield services
    finally:
        services.stop_all()
