"""The process that sends weights by NCCL, from the side that started it."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.serving.vllm import nccl_sender
from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import server_environment
from infra.serving.vllm.failures import ServerDownError
from infra.serving.vllm.last_words import last_words
from infra.training.die_with_parent import bound_to_this_process
from mgrpo_core.errors import ConfigError

# Every weight's name and shape come in one line.
_LONGEST_LINE = 2**28
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    """What the sender has come to.

    Attributes:
        name: `ready`, a route of vLLM's weight transfer that it wants asked, or `sent`.
        body: of the request.
    """

    name: str
    body: Any = None


class SenderProcess:
    """A running `nccl_sender`. It dies with the thread that started it, on Linux, however that ends.

    Args:
        policy: whose weights it sends.
        log: its output.
    """

    def __init__(self, process: asyncio.subprocess.Process, policy: str, log: Path) -> None:
        self._process = process
        self._policy = policy
        self._log = log

    @classmethod
    async def start(cls, build: VllmBuild, policy: str, log: Path) -> "SenderProcess":
        environment = server_environment(build)
        command = bound_to_this_process(sender_command(build), environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output.fileno(),
                limit=_LONGEST_LINE,
                start_new_session=True,  # Ctrl-C reaches it through us alone
            )
        return cls(process, policy, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def hear(self) -> Step:
        """What it says next.

        Raises:
            ConfigError: nothing can be sent from here.
            ServerDownError: it failed, or ended.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        said = json.loads(line) if line else {"fails": f"exit code {await self._process.wait()}"}
        if "refuses" in said:
            raise ConfigError(
                f"policies.{self._policy}.serving.transfer: nccl, but {said['refuses']}. NCCL sends from a GPU of the "
                "iteration's machine, one that none of the policy's servers uses, with vLLM's CUDA build as "
                "MGRPO_VLLM_PYTHON. Run there; or use transfer: folder, with serving.folder on a disk that the servers "
                "read."
            )
        if "fails" in said:
            raise ServerDownError(
                f"policy {self._policy!r}: its weights could not be sent by NCCL: {said['fails']}."
                f"{last_words(self._log)}"
            )
        return Step(said["step"], said.get("body"))

    async def tell(self, **what: Any) -> None:
        """Answer what it said last."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended; `hear` says how
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            await self._process.stdin.drain()

    async def wait(self, wait_s: float = _END_S) -> None:
        """Until it has ended by itself, or no longer than this."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), wait_s)

    async def kill(self) -> None:
        """End it, and what it started. May be called twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        given_up: asyncio.CancelledError | None = None
        while self._process.returncode is None:  # a moment, to the end of which nobody else would see
            try:
                await self._process.wait()
            except asyncio.CancelledError as error:
                given_up = error
        if given_up is not None:
            raise given_up


def sender_command(build: VllmBuild) -> Sequence[str]:
    """The command line. -I: the sender's own folder would be searched first, and holds modules of common names."""
    return [str(build.python), "-I", nccl_sender.__file__]
