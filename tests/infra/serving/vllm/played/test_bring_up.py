"""Before a server is used: what it must be, the order in which it gets a version, and the proof."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.serving.vllm.probe import TEMPERATURE
from mgrpo_core.errors import ConfigError, PolicyServerError
from tests.infra.serving.vllm.played.conftest import QUICK, Clients, ask
from tests.infra.serving.vllm.played_server import CONTEXT, GENERATE, PlayedServer


def test_a_version_is_loaded_forgotten_labelled_and_proven_in_this_order(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client_of(server.url).load(0, folder)
    order = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", GENERATE]
    assert list(dict.fromkeys(route for route in server.asked if route in order)) == order
    again = client_of(server.url)
    again.load(0, folder)  # it has the label: nothing is loaded, but proven all the same
    assert server.count("/collective_rpc") == 1
    assert again.publications[0].loaded_bytes == 0


@pytest.mark.parametrize(
    ("route", "answer", "said"),
    [
        ("/v1/models", b"<html>hello</html>", "is no JSON.*Is it vLLM"),
        ("/v1/models", {"models": []}, "is no list of models.*Is it vLLM"),
        ("/v1/models", 401, "set VLLM_API_KEY"),
        ("/weight_info", 404, "VLLM_SERVER_DEV_MODE=1"),
        (GENERATE, 403, "--enable-scale-out"),
    ],
)
def test_a_server_that_is_none_for_us_is_refused_before_the_first_rollout(
    server: PlayedServer, client_of: Clients, folder: Path, route: str, answer: object, said: str
) -> None:
    server.spoil = lambda asked, honest: answer if asked == route else honest
    with pytest.raises(PolicyServerError, match=said):
        client_of(server.url).load(0, folder)


def not_this_model(server: PlayedServer) -> None:
    server.name = "llama-3"


def too_short(server: PlayedServer) -> None:
    server.context = CONTEXT - 1


def other_tokenizer(server: PlayedServer) -> None:
    server.spoil = lambda route, answer: {"tokens": [3, *answer["tokens"]]} if route == "/tokenize" else answer


def other_weights(server: PlayedServer) -> None:
    """It says that it loaded them, and still computes with those of another model of this name."""
    server.probe = replace(server.probe, logits_NV=server.probe.logits_NV.roll(1, dims=1))


def larger_vocabulary(server: PlayedServer) -> None:
    def beyond(route: str, answer: dict) -> object:
        if route == GENERATE:
            choice = answer["choices"][0]
            choice["token_ids"] = [10**6]
            choice["logprobs"]["content"][0]["token_id"] = 10**6
        return answer

    server.spoil = beyond


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (
            not_this_model,
            ConfigError,
            r"policies\.main\.servers: {url} serves llama-3, expected 'main'.*mgrpo serve main",
        ),
        (
            too_short,
            ConfigError,
            r"policies\.main\.context: 384, but {url} takes 383 tokens at most.*--max-model-len 384",
        ),
        (other_tokenizer, ConfigError, r"policies\.main\.servers: {url} has another tokenizer.*version 0.*part at 0"),
        (
            other_weights,
            PolicyServerError,
            r"policy 'main' version 0 at {url}: log-probs of the probe differ.*other weig",
        ),
        (larger_vocabulary, PolicyServerError, r"version 0 at {url}: sampled an id beyond the trainer's vocabulary"),
    ],
)
def test_another_model_than_the_policy_behind_the_port_is_refused_before_the_first_rollout(
    server: PlayedServer,
    client_of: Clients,
    folder: Path,
    wrong: Callable[[PlayedServer], None],
    error: type[Exception],
    said: str,
) -> None:
    wrong(server)
    client = client_of(server.url)
    with pytest.raises(error, match=said.format(url=server.url)):
        client.load(0, folder)
    assert client.version is None


async def test_a_server_with_another_version_is_brought_to_ours_before_its_answers_count(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url)
    client.load(3, folder)
    server.label = "main/2/a"  # another run loaded its own, or it was restarted
    server.asked.clear()
    assert (await ask(client)).policy_version == 3
    assert server.label == "main/3/a"
    assert server.count("/collective_rpc") == 1


def test_a_server_that_is_down_at_the_start_is_named_with_the_command_that_starts_it(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    server.stop()
    with pytest.raises(PolicyServerError, match=rf"{server.url} could not be .*[Cc]onnect.*mgrpo serve main"):
        client_of(server.url, **QUICK).load(0, folder)


def test_a_prefix_cache_that_is_not_dropped_stops_the_version(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    # case I1: a reset that answers "not supported"
    server.spoil = lambda route, answer: {"success": False} if route == "/reset_prefix_cache" else answer
    with pytest.raises(PolicyServerError, match="did not drop its prefix cache"):
        client_of(server.url, **QUICK).load(0, folder)
    assert server.label == "default"


def test_logprobs_before_temperature_are_told_apart_from_other_weights(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    # case B6
    def raw(route: str, answer: dict) -> object:
        if route == GENERATE:
            (entry,) = answer["choices"][0]["logprobs"]["content"]
            sampled_N = torch.log_softmax(server.probe.logits_NV / TEMPERATURE, -1)[:, entry["token_id"]]
            row = int((sampled_N - entry["logprob"]).abs().argmin())  # probes come together, in any order
            entry["logprob"] = float(server.probe.logits_NV[row].log_softmax(-1)[entry["token_id"]])
        return answer

    assert TEMPERATURE != 1
    server.spoil = raw
    with pytest.raises(PolicyServerError, match="--logprobs-mode processed_logprobs"):
        client_of(server.url).load(0, folder)
