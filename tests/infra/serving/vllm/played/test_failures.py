"""Servers that fail: what is retried, and when it ends."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mgrpo_core.errors import PolicyServerError
from tests.infra.serving.vllm.played.conftest import QUICK, Clients, ask, spoiled
from tests.infra.serving.vllm.played_server import GENERATE, HANG_UP, SAYS, PlayedServer


@pytest.mark.parametrize("failure", [500, 503, HANG_UP])
async def test_a_failure_is_asked_again_until_it_passes(
    server: PlayedServer, client_of: Clients, folder: Path, failure: object
) -> None:
    client = client_of(server.url)
    client.load(0, folder)
    left = [failure, failure]
    server.spoil = lambda route, answer: left.pop() if route == GENERATE and left else answer
    assert (await ask(client)).token_ids.tolist() == SAYS


async def test_a_server_that_pauses_gives_requests_up_and_gets_them_again(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url)
    client.load(0, folder)
    left = [spoiled(finish_reason="abort", token_ids=[], logprobs=None)]
    server.spoil = lambda route, answer: left.pop()(route, answer) if left else answer
    assert (await ask(client)).token_ids.tolist() == SAYS


async def test_a_server_that_stays_down_ends_every_request_within_one_deadline(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url, **QUICK)
    client.load(0, folder)
    server.stop()
    ended = await asyncio.gather(*[ask(client, str(i)) for i in range(20)], return_exceptions=True)
    start = time.monotonic()
    for _ in range(60):  # one after another, as the turns of other rollouts come: none of them waits once more
        ended += await asyncio.gather(ask(client), return_exceptions=True)
    assert time.monotonic() - start < 30  # a deadline for each would be 36 s
    for error in ended:
        assert isinstance(error, PolicyServerError)
        assert server.url in str(error)
        assert "has answered for" in str(error)
    server.start()
    await asyncio.sleep(client._replicas[0].rest_s)
    assert (await ask(client)).token_ids.tolist() == SAYS


async def test_a_server_that_restarts_is_given_the_version_and_proves_it_before_it_is_used(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url)
    client.load(3, folder)
    server.stop()
    waiting = asyncio.create_task(ask(client))
    await asyncio.sleep(0.3)
    server.label = "default"
    server.asked.clear()
    server.start()
    assert (await waiting).policy_version == 3
    assert server.asked.index("/collective_rpc") < server.asked.index(GENERATE)
    assert server.label == "main/3/a"


async def test_a_trajectory_keeps_to_its_server_and_moves_when_that_is_gone(
    servers: Callable[[], PlayedServer], client_of: Clients, folder: Path
) -> None:
    one, two = servers(), servers()
    client = client_of(one.url, two.url)
    client.load(0, folder)
    for server in (one, two):
        server.asked.clear()
    for _ in range(3):
        await asyncio.gather(*[ask(client, str(i)) for i in range(32)])
    shares = [server.count(GENERATE) for server in (one, two)]
    assert sum(shares) == 96
    assert min(shares) > 15
    assert all(share % 3 == 0 for share in shares)  # the same trajectories, three times
    one.stop()
    made = await asyncio.gather(*[ask(client, str(i)) for i in range(32)])
    assert all(answer.token_ids.tolist() == SAYS for answer in made)


async def test_no_more_requests_are_at_a_server_than_it_shall_have(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url, concurrency=3)
    client.load(0, folder)
    at_work: list[int] = []
    most: list[int] = []

    def slowly(route: str, answer: object) -> object:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.02)
        at_work.pop()
        return answer

    server.spoil = slowly
    await asyncio.gather(*[ask(client, str(i)) for i in range(12)])
    assert max(most) == 3


async def test_a_caller_that_gives_up_leaves_no_request_behind(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url, concurrency=1)
    client.load(0, folder)
    server.spoil = lambda route, answer: time.sleep(0.3) or answer
    asking = asyncio.create_task(ask(client))
    await asyncio.sleep(0.1)
    with pytest.raises(PolicyServerError, match="version 1 cannot be loaded while 1 requests are in flight"):
        client.load(1, folder)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    server.spoil = None
    assert (await ask(client)).token_ids.tolist() == SAYS  # the only place is free again
