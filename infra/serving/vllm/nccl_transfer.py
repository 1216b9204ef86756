"""Weights sent from a GPU of this machine to those of the servers, by NCCL: for servers that read no disk of ours.

Every transfer has a sender and a group of its own. That costs a start and a rendezvous each time, and in return no
server that was restarted is waited for in a group that it has left: NCCL would do so for ever.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.failures import ServerDownError
from infra.serving.vllm.nccl_group import NcclGroup
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.sender_process import SenderProcess
from infra.serving.vllm.server_api import ServerApi
from mgrpo_core.config import ServingConfig
from mgrpo_core.errors import ConfigError


@dataclass(slots=True)
class _Departure:
    """A transfer, and who goes along; those that have given up are counted."""

    wanted: ServedVersion
    task: "asyncio.Task[None] | None" = None
    servers: list[ServerApi] = field(default_factory=list)
    gone: int = 0


class NcclTransfer:
    """Replaces the weights of a policy's servers, one transfer at a time.

    Args:
        policy: its name.
        build: where vLLM is.
        log: for the senders' output.
        serving: `deadline_s` until a rendezvous is complete, `timeout_s` for each step after it.
    """

    def __init__(self, policy: str, build: VllmBuild, log: Path, serving: ServingConfig) -> None:
        self._policy = policy
        self._build = build
        self._log = log
        self._serving = serving
        self._one_at_a_time = asyncio.Lock()
        self._can_send = False
        self._next: _Departure | None = None

    async def check(self, api: ServerApi) -> None:
        """Raise ConfigError where the server takes no weights by NCCL, or no GPU is here to send them from."""
        backend = await api.transfer_backend()
        if backend != "nccl":
            raise ConfigError(
                f"policies.{self._policy}.serving.transfer: nccl, but {api.url} was started with "
                f"{'no weight transfer' if backend is None else f'weight transfer by {backend}'}. Start it with `mgrpo "
                f'serve {self._policy}`, or with --weight-transfer-config \'{{"backend": "nccl"}}\'; or use transfer: '
                "folder."
            )
        if self._can_send:
            return
        async with self._one_at_a_time:
            if self._can_send:  # found so meanwhile
                return
            sender = await SenderProcess.start(self._build, self._policy, self._log)
            try:
                await self._ready(sender, asyncio.get_running_loop().time() + self._serving.deadline_s)
            finally:
                await sender.kill()
            self._can_send = True

    async def load(self, api: ServerApi, wanted: ServedVersion) -> None:
        """Have a server replace its weights. Servers that ask for a version while its sender starts go together.

        Raises:
            ConfigError: nothing can be sent from this machine.
            ServerDownError: the sender or a server of the group failed, or was silent for too long.
            ServerUnfitError: a server of the group takes no weights by NCCL.
        """
        departure = self._next
        if departure is None or departure.wanted.label != wanted.label:
            departure = self._next = _Departure(wanted)
            departure.task = asyncio.create_task(self._run(departure))
        departure.servers.append(api)
        assert departure.task is not None
        try:
            await asyncio.shield(departure.task)
        except asyncio.CancelledError:
            departure.gone += 1
            if departure.gone == len(departure.servers) and not departure.task.cancelling():
                departure.task.cancel()
            raise

    async def _run(self, departure: _Departure) -> None:
        try:
            async with self._one_at_a_time:
                end = asyncio.get_running_loop().time() + self._serving.deadline_s
                sender = await SenderProcess.start(self._build, self._policy, self._log)
                try:
                    await self._ready(sender, end)
                    self._close(departure)
                    group = NcclGroup(departure.servers, departure.wanted, self._serving)
                    try:
                        await group.send(sender, end)
                    except BaseException:
                        await sender.kill()  # first: servers wait for it
                        await group.tidy()
                        raise
                    await sender.wait()
                finally:
                    await sender.kill()
        finally:
            self._close(departure)

    async def _ready(self, sender: SenderProcess, end: float) -> None:
        try:
            async with asyncio.timeout_at(end):
                await sender.hear()
        except TimeoutError as error:
            raise ServerDownError(
                f"policy {self._policy!r}: the process that sends weights by NCCL was not ready within "
                f"{self._serving.deadline_s:g} s (serving.deadline_s). Raise it if it was still importing vLLM: "
                f"{self._log}"
            ) from error

    def _close(self, departure: _Departure) -> None:
        """Nobody joins it any more."""
        if self._next is departure:
            self._next = None
