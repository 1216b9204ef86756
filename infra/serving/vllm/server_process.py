"""A vLLM server as a process of ours: started, waited for, stopped with everything that it started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import ServerSettings, server_command, server_environment
from infra.serving.vllm.last_words import last_words
from infra.training.die_with_parent import bound_to_this_process
from mgrpo_core.errors import PolicyServerError

_STOP_S = 20.0
_ASK_EVERY_S = 0.25
# Addresses that stand for all of a machine's, and which of these to ask.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


class ServerProcess:
    """A running server. It dies with the thread that started it, on Linux, however that ends.

    Args:
        build: where vLLM is.
        settings: what it serves.
        log: its output; None = ours.
    """

    def __init__(self, build: VllmBuild, settings: ServerSettings, log: Path | None = None) -> None:
        self._settings = settings
        self._log = log
        environment = server_environment(build)
        command = bound_to_this_process(server_command(build, settings), environment)
        if log is None:
            self._process = self._start(command, environment, None)
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._process = self._start(command, environment, output.fileno())

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = _LOOPBACK.get(self._settings.host, self._settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._settings.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_until_it_answers(self, deadline_s: float) -> None:
        """Block until the server takes requests.

        Raises: PolicyServerError where it ends first, or the deadline passes; with the last lines of its log.
        """
        end = time.monotonic() + deadline_s
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while not self._answers(http):
                if self.exit_code is not None:
                    raise PolicyServerError(
                        f"the vLLM server of policy {self._settings.policy!r} ended with exit code {self.exit_code} "
                        f"before it answered.{self._last_words()}"
                    )
                if time.monotonic() > end:
                    raise PolicyServerError(
                        f"the vLLM server of policy {self._settings.policy!r} did not answer at {self.url} within "
                        f"{deadline_s:g} s. Raise `serving.start_deadline_s` if it was still loading."
                        f"{self._last_words()}"
                    )
                time.sleep(_ASK_EVERY_S)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send the server a signal; it ends its own processes."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ask it to end, then make it. May be called twice."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._end_group()
        self._process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @staticmethod
    def _start(command: Sequence[str], environment: dict[str, str], output: int | None) -> "subprocess.Popen[bytes]":
        # A group of its own: Ctrl-C reaches it through us alone, and its engine's processes can be ended with it.
        return subprocess.Popen(  # noqa: S603  # our own command line
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answers(self, http: httpx.Client) -> bool:
        try:
            return http.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _last_words(self) -> str:
        return "" if self._log is None else last_words(self._log)
