"""Transfers that are never complete: each ends, in time, with the name of who was silent, and leaves no process."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from infra.serving.vllm.connections import Connections
from infra.serving.vllm.failures import ServerDownError
from infra.serving.vllm.nccl_group import NcclGroup
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.sender_process import SenderProcess
from infra.serving.vllm.server_api import ServerApi
from mgrpo_core.config import ServingConfig
from mgrpo_core.errors import PolicyServerError
from tests.infra.serving.vllm.played.nccl.conftest import Clients, Load, Servers, alive, silent_at
from tests.infra.serving.vllm.played.nccl.played_sender import PlayedSender
from tests.infra.serving.vllm.played_server import INIT, START, UPDATE


async def test_a_rendezvous_that_is_never_complete_ends_at_the_deadline_with_the_servers_name(
    servers: Servers, sender: PlayedSender, wanted: ServedVersion, silence: threading.Event, tmp_path: Path
) -> None:
    good, bad = servers(), servers()
    silent_at(bad, INIT, silence)
    process = await SenderProcess.start(sender.build, "main", tmp_path / "log")
    try:
        assert (await process.hear()).name == "ready"
        said = rf"'main': the NCCL rendezvous for version 0 .*within 2 s \(ser.*; silent: {bad.url}\. .*127\.0\.0\.1\."
        async with Connections({}) as http:
            apis = [ServerApi(http, one.url, "main") for one in (good, bad)]
            group = NcclGroup(apis, wanted, ServingConfig(deadline_s=2.0, connect_timeout_s=1.0))
            with pytest.raises(ServerDownError, match=said):
                await group.send(process, asyncio.get_running_loop().time() + 2.0)
            await group.tidy()
    finally:
        await process.kill()
    assert good.count(START) == 0
    assert (good.asked[-1], bad.asked[-1]) == ("/resume", "/resume")


async def test_a_server_that_waits_in_nccl_ends_after_the_time_out_of_an_answer(
    servers: Servers, load: Load, silence: threading.Event
) -> None:
    server = servers()
    silent_at(server, UPDATE, silence)
    said = rf"version 0: silent for 1 s \(serving\.timeout_s\) at update_weights: {server.url}.*restart it"
    with pytest.raises(ServerDownError, match=said):
        await load(server, timeout_s=1.0)


def test_a_sender_that_is_never_ready_ends_at_the_deadline_with_its_log(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path
) -> None:
    server = servers()
    sender.do("deaf")
    said = r"not ready within 1 s \(serving\.deadline_s\).*nccl-main\.log"
    with pytest.raises(PolicyServerError, match=said):
        client_of(server, deadline_s=1.0, connect_timeout_s=1.0).load(0, folder)
    assert not any(alive(pid) for pid in sender.pids)
    assert server.count("/pause") == 0


@pytest.mark.parametrize("step", [INIT, UPDATE])
async def test_a_sender_that_dies_is_told_at_once_with_its_last_words(
    servers: Servers, load: Load, sender: PlayedSender, step: str, silence: threading.Event
) -> None:
    # the server waits for it, for ever
    server = servers()
    silent_at(server, step, silence)
    sender.do(f"dies at {step[1:]}")
    start = time.monotonic()
    with pytest.raises(ServerDownError, match=r"(?s)'main'.*by NCCL: exit code 6\..*Duplicate GPU detected"):
        await load(server, deadline_s=60.0)
    assert time.monotonic() - start < 40
    assert server.asked[-1] == "/resume"


def test_a_client_that_is_closed_takes_its_sender_along(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path, silence: threading.Event
) -> None:
    server = servers()
    silent_at(server, UPDATE, silence)
    client = client_of(server)
    failed: list[BaseException] = []

    def load() -> None:
        try:
            client.load(0, folder)
        except BaseException as error:
            failed.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    while server.count(UPDATE) == 0:
        time.sleep(0.02)
    assert alive(sender.pids[-1])
    client.close()
    loading.join(20)
    assert failed
    assert not alive(sender.pids[-1])


async def test_a_server_that_gives_up_leaves_the_others_their_transfer_and_the_last_one_ends_it(
    servers: Servers, load: Load, sender: PlayedSender, silence: threading.Event
) -> None:
    one, two = servers(), servers()
    silent_at(one, UPDATE, silence)
    loading = [asyncio.create_task(load(server)) for server in (one, two)]
    while two.count(UPDATE) == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    for given_up, goes_on in zip(loading, (True, False), strict=True):
        given_up.cancel()
        await asyncio.wait([given_up])
        await asyncio.sleep(0.2)
        assert alive(sender.pids[-1]) == goes_on


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal to children is Linux's")
def test_a_sender_does_not_outlive_the_process_that_started_it(sender: PlayedSender, tmp_path: Path) -> None:
    sender.do("deaf")
    program = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from infra.serving.vllm.build import VllmBuild
        from infra.serving.vllm.sender_process import SenderProcess

        async def start() -> None:
            build = VllmBuild(Path({str(sender.build.python)!r}), "0")
            process = await SenderProcess.start(build, "main", Path({str(tmp_path / "log")!r}))
            while "importing" not in Path({str(tmp_path / "log")!r}).read_text():
                await asyncio.sleep(0.02)
            print(process.pid, flush=True)
            input()

        asyncio.run(start())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
