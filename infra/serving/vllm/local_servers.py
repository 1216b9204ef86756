"""A policy's servers that are ours: processes on this machine, on free ports, which end with us."""

import logging
import random
import socket
import threading
from pathlib import Path

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.server_process import ServerProcess
from infra.store.adapter_folder import adapter_rank
from mgrpo_core.errors import PolicyServerError

_log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Below the range that systems take for outgoing connections, so that none of those gets in between choice and use.
_PORTS = range(15_000, 32_000)


class LocalServers:
    """Starts a server when its client first needs it, and again when it has died.

    Args:
        policy: its name.
        count: how many.
        build: where vLLM is.
        logs: folder for their output.
        deadline_s: longest wait for one to answer.
        lora_rank: of the adapters that the policy trains; None = it trains none, though it may begin with one.
    """

    def __init__(
        self,
        policy: str,
        count: int,
        build: VllmBuild,
        logs: Path,
        deadline_s: float,
        *,
        lora_rank: int | None = None,
    ) -> None:
        self._policy = policy
        self._build = build
        self._logs = logs
        self._deadline_s = deadline_s
        self._lora_rank = lora_rank
        self._ports = _free_ports(count)
        self._running: dict[str, ServerProcess] = {}
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://{_HOST}:{port}" for port in self._ports)

    def ensure(self, url: str, wanted: ServedVersion) -> None:
        """Have the server of this URL run; blocks until it answers. Does nothing for a server that is not ours.

        Raises: PolicyServerError where it ends or stays silent.
        """
        if url not in self.urls:
            return
        with self._lock:
            process = self._running.get(url)
            if process is not None and process.exit_code is None:
                return
            if process is not None:
                _log.warning("The server %s of policy %s has died; it is started again.", url, self._policy)
                process.stop()
            if self._stopped:
                raise PolicyServerError(f"policy {self._policy!r}: its servers were stopped.")
            settings = ServerSettings(
                self._policy,
                wanted.folder,
                wanted.dtype,
                wanted.context,
                _HOST,
                int(url.rsplit(":", 1)[1]),
                lora_rank=self._lora_rank or (adapter_rank(wanted.adapter.folder) if wanted.adapter else None),
            )
            log = self._logs / f"vllm-{self._policy}-{settings.port}.log"
            self._running[url] = ServerProcess(self._build, settings, log)
        self._running[url].wait_until_it_answers(self._deadline_s)

    def stop(self) -> None:
        """Stop them all. May be called twice."""
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                process.stop()
            self._running.clear()


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    # From the system's entropy: two that start at the same moment must not choose alike.
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((_HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise PolicyServerError(f"fewer than {count} of 200 ports tried on {_HOST} are free. Stop what holds them.")
