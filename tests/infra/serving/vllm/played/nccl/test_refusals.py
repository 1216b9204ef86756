"""What is refused before weights are sent by NCCL, and a server that fails at a step."""

from pathlib import Path

import pytest

from mgrpo_core.errors import ConfigError, PolicyServerError
from tests.infra.serving.vllm.played.nccl.conftest import Clients, Servers, alive
from tests.infra.serving.vllm.played.nccl.played_sender import PlayedSender
from tests.infra.serving.vllm.played_server import FINISH, INIT, START, TRANSFER, UPDATE


def test_without_a_gpu_here_the_run_is_refused_before_a_server_is_touched(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path
) -> None:
    server = servers()
    server.label = "main/0/a"  # nothing would have to be sent yet
    sender.do("refuses")
    said = r"policies\.main\.serving\.transfer: nccl, but .* sees no CUDA GPU .*MGRPO_VLLM_PYTHON.*transfer: folder"
    with pytest.raises(ConfigError, match=said):
        client_of(server).load(0, folder)
    assert not {"/pause", "/update_weight_version", *TRANSFER} & set(server.asked)


@pytest.mark.parametrize(
    ("backend", "said"),
    [(None, "no weight transfer"), ("ipc", "weight transfer by ipc"), ("sparse_nccl", "sparse_nccl")],
)
def test_a_server_that_was_started_without_is_refused_with_the_command_that_starts_it(
    servers: Servers, client_of: Clients, folder: Path, backend: str | None, said: str
) -> None:
    good, bad = servers(), servers()
    bad.backend = backend
    bad.label = "main/0/a"  # also where it holds the version already
    said = rf"policies\.main\.serving\.transfer: nccl, but {bad.url} .*{said}\. Start it with `mgrpo serve main`"
    with pytest.raises(ConfigError, match=said):
        client_of(good, bad).load(0, folder)
    assert bad.count("/pause") == 0


@pytest.mark.parametrize("route", [INIT, START, UPDATE, FINISH])
def test_a_step_that_a_server_fails_at_is_not_repeated_and_the_others_are_left_in_order(
    servers: Servers, client_of: Clients, sender: PlayedSender, folder: Path, route: str
) -> None:
    good, bad = servers(), servers()
    bad.spoil = lambda asked, honest: 500 if asked == route else honest
    with pytest.raises(PolicyServerError, match=rf"{bad.url}{route}: status 500.*restart it"):
        client_of(good, bad).load(0, folder)
    assert (bad.count(INIT), good.asked[-1]) == (1, "/resume")
    assert good.label == "not main/0/a"
    assert (good.count(FINISH) > 0) == (route != INIT)  # begun: it would refuse the next one
    assert not any(alive(pid) for pid in sender.pids)
