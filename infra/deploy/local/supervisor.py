"""supervisord of a home: start it, find it again, and ask it, over a unix socket, to start and stop programs."""

import contextlib
import os
import subprocess
import sys
import time
import xmlrpc.client  # speaks with nobody but our own supervisord
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from infra.deploy.local.home import LocalHome, Running, write_private
from infra.deploy.local.leftovers import inherited_environment, is_alive, mark_of
from infra.deploy.local.program import Program
from mgrpo_core.errors import InfrastructureError

_START_DEADLINE_S = 30.0
_SHUTDOWN_DEADLINE_S = 90.0
_POLL_S = 0.05
UNREACHABLE = (OSError, HTTPException, xmlrpc.client.ProtocolError)
_RUNNING = "RUNNING"
_STOPPABLE = frozenset({"STARTING", "RUNNING", "BACKOFF"})
_ENDED = frozenset({"STOPPED", "FATAL", "UNKNOWN"})  # not EXITED: all of ours are started again
_SHUTTING_DOWN = 6  # supervisor.xmlrpc.Faults.SHUTDOWN_STATE


@dataclass(frozen=True, slots=True)
class ProgramState:
    """What supervisord knows of a program."""

    state: str
    """Its word: STARTING, RUNNING, BACKOFF, STOPPING, STOPPED, EXITED, FATAL, UNKNOWN."""
    pid: int | None
    """None while there is no process."""
    started: float
    """Seconds since the epoch, whole ones."""
    remark: str
    """For people: how it ended, how long it has been up."""

    @property
    def is_running(self) -> bool:
        """Whether there is a process, and not just for a moment."""
        return self.state == _RUNNING

    @property
    def has_ended(self) -> bool:
        """Whether there is none, and none will be started again."""
        return self.state in _ENDED


class Supervisor:
    """A supervisord that answers."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.pid = int(self._call("getPID"))

    @classmethod
    def find(cls, running: Running) -> "Supervisor | None":
        """The one that was started for `running`; None if it is gone."""
        try:
            return cls(_socket_of(running))
        except UNREACHABLE:
            return None

    @classmethod
    def launch(cls, home: LocalHome, running: Running, programs: Iterable[Program]) -> "Supervisor":
        """Start supervisord, and none of the programs.

        It becomes a daemon, so that Ctrl-C reaches only the command, which then stops all in order.

        Raises: InfrastructureError if it does not come up.
        """
        write_private(home.supervisor_config, _config(home, running, programs))
        done = subprocess.run(  # noqa: S603  # our own words
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(home.supervisor_config)],
            env=inherited_environment() | mark_of(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_DEADLINE_S,
            check=False,
        )
        deadline = time.monotonic() + _START_DEADLINE_S
        while done.returncode == 0 and time.monotonic() < deadline:
            if found := cls.find(running):
                return found
            time.sleep(_POLL_S)
        raise InfrastructureError(
            f"supervisord: {f'ended with {done.returncode}' if done.returncode else 'no answer'}. It said: "
            f"{(done.stdout + done.stderr).strip() or 'nothing'}. Its log: {home.log_of('supervisord')}."
        )

    def state(self, name: str) -> ProgramState:
        """Of one program. Raises InfrastructureError if there is none of that name."""
        return _state(self._call("getProcessInfo", name))

    def states(self) -> dict[str, ProgramState]:
        """Of all programs, by name."""
        return {info["name"]: _state(info) for info in self._call("getAllProcessInfo")}

    def start(self, name: str) -> None:
        """Ask for the program's start; it is there when its state says so.

        Raises: InfrastructureError if it runs already, or its file cannot be run.
        """
        self._call("startProcess", name, False)

    def stop(self, names: Iterable[str]) -> None:
        """Stop these at the same time, and return when the last has ended, by SIGKILL if need be."""
        names = set(names)
        while going := [name for name, state in self.states().items() if name in names and not state.has_ended]:
            for name in going:
                if self.state(name).state in _STOPPABLE:
                    # It may end by itself in between; then it is looked at again.
                    with contextlib.suppress(InfrastructureError):
                        self._call("stopProcess", name, False)
            time.sleep(_POLL_S)

    def shut_down(self) -> None:
        """End supervisord and what it still runs."""
        self._call("shutdown")
        deadline = time.monotonic() + _SHUTDOWN_DEADLINE_S
        while is_alive(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            with _proxy(self._socket) as proxy:
                return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == _SHUTTING_DOWN:
                raise ConnectionAbortedError("supervisord is shutting down") from None
            raise InfrastructureError(
                f"supervisord refuses {method}({', '.join(map(repr, arguments))}): {fault.faultString}. "
                "Give the name of a program that it knows and that is not in that state already."
            ) from None


@contextmanager
def _proxy(socket: Path) -> Iterator[Any]:
    from supervisor.xmlrpc import SupervisorTransport  # extra `local`

    transport: Any = SupervisorTransport(None, None, serverurl=f"unix://{socket}")
    try:
        yield xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)  # the address is not used
    finally:
        transport.close()


def _state(info: dict[str, Any]) -> ProgramState:
    return ProgramState(info["statename"], info["pid"] or None, info["start"], info["description"])


def _socket_of(running: Running) -> Path:
    return running.sockets / "supervisor.sock"


def _config(home: LocalHome, running: Running, programs: Iterable[Program]) -> str:
    def path(value: Path) -> str:
        return str(value).replace("%", "%%")

    lines = [
        "[unix_http_server]",
        f"file={path(_socket_of(running))}",
        "chmod=0700",
        "",
        "[supervisord]",
        f"logfile={path(home.log_of('supervisord'))}",
        f"pidfile={path(running.sockets / 'supervisord.pid')}",
        f"directory={path(home.folder)}",
        *(["user=root"] if os.geteuid() == 0 else []),
        "",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        "",
    ]
    return "\n".join(lines) + "\n" + "\n".join(program.section(home.log_of(program.name)) for program in programs)
