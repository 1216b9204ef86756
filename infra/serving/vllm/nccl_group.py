"""One transfer of weights by NCCL as the servers see it: what they are asked, in which order, and for how long."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from infra.serving.vllm.failures import ServerDownError
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.sender_process import SenderProcess
from infra.serving.vllm.server_api import ServerApi
from mgrpo_core.config import ServingConfig

# Routes of vLLM's weight transfer.
_INIT = "init_weight_transfer_engine"
_FINISH = "finish_weight_update"
_RELEASE = "shutdown_weight_transfer_engine"
# How long servers are asked to be as they were, after a transfer that failed.
_TIDY_S = 5.0

Result = TypeVar("Result")


class NcclGroup:
    """A sender, which is rank 0, and every worker of some servers; formed for one version.

    Args:
        servers: of one policy; their workers have the ranks from 1 on, in this order.
        wanted: what they shall hold.
        serving: `deadline_s` for the rendezvous, `timeout_s` for each step after it.
    """

    def __init__(self, servers: Sequence[ServerApi], wanted: ServedVersion, serving: ServingConfig) -> None:
        self._servers = tuple(servers)
        self._wanted = wanted
        self._serving = serving
        self._first_ranks: dict[str, int] = {}
        self._at: str | None = None
        self._silent: list[str] = []

    async def send(self, sender: SenderProcess, end: float) -> None:
        """Have a sender that is ready send the version, and every server load it; leave them as they were otherwise.

        No request is computed meanwhile: between its steps a server's layers are empty.

        Args:
            sender: its next line will be its first request.
            end: of the rendezvous, in the event loop's time.

        Raises:
            ServerDownError: a server or the sender failed or was silent. `tidy` comes next, once the sender has ended.
            ServerUnfitError: a server takes no weights by NCCL.
        """
        address = await asyncio.to_thread(_address_towards, [api.url for api in self._servers])
        try:
            async with asyncio.timeout_at(end) as limit:
                sizes = await self._each(lambda api: api.world_size())
                self._first_ranks = _first_ranks([api.url for api in self._servers], sizes)
                await self._each(self._prepare)
                await sender.tell(address=address, world_size=1 + sum(sizes), folder=str(self._wanted.folder))
                while (step := await sender.hear()).name != "sent":
                    self._at = step.name
                    await self._each(lambda api, step=step: self._ask(api, step.name, step.body), sender)
                    limit.reschedule(asyncio.get_running_loop().time() + self._serving.timeout_s)
                    await sender.tell()
                await self._each(lambda api: api.transfer_step(_RELEASE))
                await self._each(lambda api: api.resume())
        except TimeoutError as error:
            raise ServerDownError(self._on_time_out(address)) from error

    async def tidy(self) -> None:
        """After a failure: have servers drop what was begun, and compute again. Those that cannot are left alone."""

        async def tidy(api: ServerApi) -> None:
            # a server whose own update failed has ended it already, and says so
            for step in (*(() if self._at in (None, _INIT) else (_FINISH,)), _RELEASE):
                with contextlib.suppress(Exception):
                    await api.transfer_step(step)
            with contextlib.suppress(Exception):
                await api.resume()

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIDY_S):
                await asyncio.gather(*[tidy(api) for api in self._servers])

    async def _prepare(self, api: ServerApi) -> None:
        await api.pause()
        await api.transfer_step(_RELEASE)  # of a trainer that was killed; else it does nothing
        # From here on it holds neither version whole.
        await api.set_weight_label(f"not {self._wanted.label}")

    async def _ask(self, api: ServerApi, step: str, body: Any) -> None:
        if step == _INIT:  # vLLM's trainer side knows of one server, whose ranks begin at 1
            body = {"init_info": {**body["init_info"], "rank_offset": self._first_ranks[api.url]}}
        await api.transfer_step(step, body)

    async def _each(
        self, ask: Callable[[ServerApi], Awaitable[Result]], sender: SenderProcess | None = None
    ) -> list[Result]:
        """What every server answers. The first error counts, the sender's too: without it, servers wait for ever."""
        asked = [asyncio.ensure_future(ask(api)) for api in self._servers]
        watched = [] if sender is None else [asyncio.ensure_future(sender.hear())]
        try:
            pending: set[asyncio.Future[Any]] = {*asked, *watched}
            while not all(one.done() for one in asked):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            return [one.result() for one in asked]
        finally:
            self._silent = [api.url for api, one in zip(self._servers, asked, strict=True) if not one.done()]
            for one in (*asked, *watched):
                one.cancel()
            await asyncio.gather(*asked, *watched, return_exceptions=True)

    def _on_time_out(self, address: str) -> str:
        policy, version, serving = self._wanted.policy, self._wanted.version, self._serving
        who = ", ".join(self._silent) or "the sender"
        if self._at in (None, _INIT):
            return (
                f"policy {policy!r}: the NCCL rendezvous for version {version} was not complete within "
                f"{serving.deadline_s:g} s (serving.deadline_s); silent: {who}. Servers were told to meet at "
                f"{address}. Let them reach any port of this machine and of each other, and give every server, and the "
                "sender, GPUs of its own. Restart a server that stays silent."
            )
        return (
            f"policy {policy!r}: NCCL transfer of version {version}: silent for {serving.timeout_s:g} s "
            f"(serving.timeout_s) at {self._at}: {who}. A server that waits in NCCL does not come back: restart it."
        )


def _first_ranks(urls: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Rank 0 sends."""
    return {url: 1 + sum(sizes[:i]) for i, url in enumerate(urls)}


def _address_towards(urls: Sequence[str]) -> str:
    """This machine's address on its way to the servers, one that other machines know where there is one."""
    found: list[str] = []
    for url in urls:
        host = urlsplit(url).hostname
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                one.connect((host, 9))  # sends nothing: it only chooses the way
                found.append(one.getsockname()[0])
        except OSError as error:
            raise ServerDownError(
                f"{url}: no way to {host} by IPv4 ({error}), by which vLLM's rendezvous goes."
            ) from error
    return min(found, key=lambda address: address.startswith("127."))
