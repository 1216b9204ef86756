"""Servers that take weights by NCCL, and what sends to them: both played."""

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.connections import Connections
from infra.serving.vllm.nccl_transfer import NcclTransfer
from infra.serving.vllm.probe import Probe
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.server_api import ServerApi
from mgrpo_core.config import ServingConfig
from tests.infra.serving.vllm.played.nccl.played_sender import PlayedSender
from tests.infra.serving.vllm.played_server import CONTEXT, PlayedServer

Servers = Callable[..., PlayedServer]
Clients = Callable[..., VllmPolicyClient]
Load = Callable[..., Coroutine[None, None, None]]


@pytest.fixture
def servers(probe: Probe, text_ids: list[int]) -> Iterator[Servers]:
    """Makes servers that take weights by NCCL."""
    made: list[PlayedServer] = []

    def server(workers: int = 1) -> PlayedServer:
        made.append(PlayedServer(probe, text_ids))
        made[-1].backend, made[-1].workers = "nccl", workers
        return made[-1]

    yield server
    for one in made:
        one.stop()


@pytest.fixture
def sender(tmp_path: Path) -> PlayedSender:
    return PlayedSender(tmp_path / "sender")


@pytest.fixture
def client_of(sender: PlayedSender, text_ids: list[int], tmp_path: Path) -> Iterator[Clients]:
    made: list[VllmPolicyClient] = []

    def client(*servers: PlayedServer, **serving: object) -> VllmPolicyClient:
        config = ServingConfig.model_validate({"deadline_s": 20.0, "transfer": "nccl", **serving})
        made.append(
            VllmPolicyClient(
                "main",
                CONTEXT,
                [one.url for one in servers],
                dtype="float32",
                serving=config,
                tokenize=lambda _: text_ids,
                label_of=lambda version: f"main/{version}/a",
                scratch=tmp_path / "served",
                transfer=NcclTransfer("main", sender.build, tmp_path / "nccl-main.log", config),
            )
        )
        return made[-1]

    yield client
    for one in made:
        one.close()


@pytest.fixture
def wanted(folder: Path, probe: Probe) -> ServedVersion:
    return ServedVersion("main", 0, "main/0/a", folder, "float32", CONTEXT, (), probe)


@pytest.fixture
async def load(sender: PlayedSender, wanted: ServedVersion, tmp_path: Path) -> AsyncIterator[Load]:
    """Sends version 0 to a server, once and without proof."""
    made: list[NcclTransfer] = []
    async with Connections({}) as http:

        async def send(server: PlayedServer, **serving: float) -> None:
            if not made:
                config = ServingConfig.model_validate({"transfer": "nccl", **serving})
                made.append(NcclTransfer("main", sender.build, tmp_path / "nccl-main.log", config))
            await made[0].load(ServerApi(http, server.url, "main"), wanted)

        yield send


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """Servers that wait for it answer when the test is over."""
    over = threading.Event()
    yield over
    over.set()


def silent_at(server: PlayedServer, route: str, over: threading.Event) -> None:
    def spoil(asked: str, honest: object) -> object:
        if asked == route:
            over.wait(60)
        return honest

    server.spoil = spoil


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
