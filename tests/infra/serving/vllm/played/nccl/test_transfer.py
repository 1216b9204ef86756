"""Weights sent by NCCL, as servers and client see it: the order, who goes along, and the proof."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mgrpo_core.errors import PolicyServerError
from tests.infra.serving.vllm.played.conftest import ask
from tests.infra.serving.vllm.played.nccl.conftest import Clients, Servers, alive
from tests.infra.serving.vllm.played.nccl.played_sender import PlayedSender
from tests.infra.serving.vllm.played_server import (
    FINISH,
    GENERATE,
    HANG_UP,
    INIT,
    RELEASE,
    SAYS,
    START,
    UPDATE,
    PlayedServer,
)

LABEL = "/update_weight_version"


def body_of(server: PlayedServer, route: str) -> dict:
    return server.bodies[server.asked.index(route)]


def test_requests_are_given_up_then_weights_prefixes_label_and_proof_in_this_order(
    servers: Servers, client_of: Clients, folder: Path
) -> None:
    server = servers()
    client = client_of(server)
    client.load(0, folder)
    begun = server.asked.index("/pause")
    assert server.asked[begun:-16] == [
        "/pause", RELEASE, LABEL, INIT, START, UPDATE, FINISH, RELEASE, "/resume", "/reset_prefix_cache", LABEL,
    ]  # fmt: skip
    assert server.asked[-16:] == [GENERATE] * 16  # the proof
    labels = [body["new_version"] for body, route in zip(server.bodies, server.asked, strict=True) if route == LABEL]
    assert labels == ["not main/0/a", "main/0/a"]  # neither version whole, meanwhile
    assert "/collective_rpc" not in server.asked
    assert client.publications[0].loaded_bytes > 0


def test_all_workers_of_all_servers_are_in_one_group(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path
) -> None:
    pair, single = servers(workers=2), servers()
    client_of(pair, single).load(0, folder)
    assert sender.job["world_size"] == 4  # the sender, two workers, and one
    assert sender.job["address"] == "127.0.0.1"
    offsets = {one.workers: body_of(one, INIT)["init_info"]["rank_offset"] for one in (pair, single)}
    assert offsets in ({2: 1, 1: 3}, {2: 2, 1: 1})  # no rank twice, whoever came first
    for one in (pair, single):
        assert one.count(INIT) == 1
        assert (
            body_of(one, INIT)["init_info"] | {"world_size": 4, "master_port": 29555} == body_of(one, INIT)["init_info"]
        )
        assert body_of(one, UPDATE)["update_info"]["names"] == ["lm_head.weight"]
        assert body_of(one, FINISH) is None
    assert len(sender.pids) == 2  # one to see whether there is a GPU, one that sends
    assert not any(alive(pid) for pid in sender.pids)


def test_the_folder_that_is_sent_has_a_tied_head_written_out(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path, tmp_path: Path
) -> None:
    client_of(servers()).load(0, folder)
    assert sender.job["folder"] == str(tmp_path / "served" / "main/0/a")
    assert (Path(sender.job["folder"]) / "head.safetensors").is_file()


def test_a_version_that_is_there_already_is_not_sent(servers: Servers, client_of: Clients, folder: Path) -> None:
    server = servers()
    client_of(server).load(0, folder)
    again = client_of(server)
    again.load(0, folder)
    assert server.count(INIT) == 1
    assert again.publications[0].loaded_bytes == 0


async def test_a_server_that_restarts_is_sent_the_version_alone(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path
) -> None:
    one, two = servers(workers=2), servers()
    client = client_of(one, two)
    await asyncio.to_thread(client.load, 3, folder)
    two.stop()
    one.stop()
    for server in (one, two):
        server.asked.clear()
        server.bodies.clear()
    two.label = "default"
    two.start()
    assert (await ask(client)).policy_version == 3
    assert sender.job["world_size"] == 2
    assert body_of(two, INIT)["init_info"]["rank_offset"] == 1
    assert (two.count(INIT), two.label) == (1, "main/3/a")
    assert one.asked == []


def test_weights_that_were_acknowledged_and_not_loaded_do_not_pass_the_probe(
    servers: Servers, client_of: Clients, folder: Path
) -> None:
    server = servers()
    server.probe = replace(server.probe, logits_NV=server.probe.logits_NV.roll(1, dims=1))
    with pytest.raises(
        PolicyServerError, match=f"policy 'main' version 0 at {server.url}: log-probs of the probe diff"
    ):
        client_of(server).load(0, folder)
    assert server.label == "not main/0/a"


def test_a_server_that_dies_in_between_is_sent_the_version_once_it_is_back(
    servers: Servers, client_of: Clients, folder: Path
) -> None:
    server = servers()
    left = [HANG_UP]
    server.spoil = lambda asked, honest: left.pop() if asked == UPDATE and left else honest
    client = client_of(server)
    client.load(0, folder)
    assert (server.count(INIT), server.label) == (2, "main/0/a")
    assert asyncio.run(ask(client)).token_ids.tolist() == SAYS
