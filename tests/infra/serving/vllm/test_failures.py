"""Servers that fail or talk nonsense: what is retried, what is named, and when it ends."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.probe import TEMPERATURE, TEXT, Probe, probe_of
from mgrpo_core.errors import ConfigError, PolicyServerError, ShapeError
from mgrpo_core.rollout.protocols import Generation, Sampling
from tests.infra.serving.vllm.played_server import CONTEXT, GENERATE, HANG_UP, SAYS, PlayedServer

Clients = Callable[..., VllmPolicyClient]
PROMPT = np.array([5, 6, 7], dtype=np.int32)
QUICK = {"deadline_s": 0.6, "connect_timeout_s": 0.5}


@pytest.fixture(scope="module")
def text_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.fixture(scope="module")
def probe(folder: Path, text_ids: list[int]) -> Probe:
    return probe_of(folder, text_ids, CONTEXT)


@pytest.fixture
def servers(probe: Probe, text_ids: list[int]) -> Iterator[Callable[[], PlayedServer]]:
    made: list[PlayedServer] = []

    def server() -> PlayedServer:
        made.append(PlayedServer(probe, text_ids))
        return made[-1]

    yield server
    for one in made:
        one.stop()


@pytest.fixture
def server(servers: Callable[[], PlayedServer]) -> PlayedServer:
    return servers()


@pytest.fixture(scope="module")
def folder(versions: tuple[Path, Path]) -> Path:
    return versions[0]


async def ask(client: VllmPolicyClient, trajectory: str = "t", tokens: int = 8) -> Generation:
    return await client.generate(PROMPT, Sampling(0.7, tokens, 17, (2,)), trajectory_id=trajectory)


def spoiled(**changes: object) -> Callable[[str, object], object]:
    """Change fields of the only completion, but leave the probe (of one token) honest."""

    def spoil(route: str, answer: object) -> object:
        if route != GENERATE or len(answer["choices"][0]["token_ids"]) == 1:
            return answer
        return {"choices": [answer["choices"][0] | changes]}

    return spoil


def content(*logprobs: object, ids: list[int] = SAYS) -> dict:
    return {"content": [{"token_id": one, "logprob": value} for one, value in zip(ids, logprobs, strict=False)]}


async def test_a_completion_comes_back_as_sampled_with_its_version(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url)
    client.load(7, folder)
    made = await ask(client)
    assert (made.token_ids.tolist(), made.finish_reason, made.policy_version) == (SAYS, "stop", 7)
    np.testing.assert_allclose(made.logprobs, [-0.3, -0.2, -0.1], rtol=1e-6)
    assert (made.token_ids.dtype, made.logprobs.dtype) == (np.int32, np.float32)
    sent = server.bodies[-1]
    assert sent["token_ids"] == PROMPT.tolist()
    assert sent["sampling_params"] | {"seed": 17, "temperature": 0.7, "max_tokens": 8} == sent["sampling_params"]
    assert sent["sampling_params"] | {"top_p": 1.0, "top_k": 0, "ignore_eos": True} == sent["sampling_params"]


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
    ("changes", "said"),
    [
        ({"logprobs": None}, "no log-probs in the answer, although they were asked for"),
        ({"logprobs": content(None, None, None)}, "none of the 3 log-probs is a number"),
        ({"logprobs": content(float("nan"), -9999.0, "high")}, "none of the 3 log-probs is a number"),
        ({"logprobs": content(-0.1, -0.2)}, "3 token ids and 2 log-probs, expected one an id"),
        ({"logprobs": content(-0.1, -0.2, -0.3, ids=[12, 2, 9])}, "log-prob 0 is of .*, but token 0 is 11"),
        ({"token_ids": None}, r"no token ids in the answer \(None\)"),
        ({"token_ids": [11, "12", 2]}, "no token ids in the answer"),
        ({"token_ids": []}, "no token ids in the answer"),
        ({"finish_reason": "error"}, "finish reason 'error', expected one of stop, length"),
        ({"weight_versions": None}, "does not say which weights made the tokens"),
        ({"weight_versions": [{"version": "main/0/a", "start": 0, "end": 2}]}, "does not say which weights"),
    ],
)
async def test_an_answer_that_lacks_something_is_named_with_its_server_and_not_asked_for_again(
    server: PlayedServer, client_of: Clients, folder: Path, changes: dict, said: str
) -> None:
    # case I3
    client = client_of(server.url)
    client.load(0, folder)
    server.spoil = spoiled(**changes)
    before = server.count(GENERATE)
    with pytest.raises(PolicyServerError, match=f"{server.url}: {said}"):
        await ask(client)
    assert server.count(GENERATE) == before + 1


@pytest.mark.parametrize("missing", [None, float("nan"), -9999.0])
async def test_a_single_logprob_that_is_missing_is_nan_in_its_place(
    server: PlayedServer, client_of: Clients, folder: Path, missing: object
) -> None:
    # case I3: its correction is 1, and it is counted; vLLM sends -9999 for NaN
    client = client_of(server.url)
    client.load(0, folder)
    server.spoil = spoiled(logprobs=content(-0.25, missing, -0.5))
    made = await ask(client)
    np.testing.assert_array_equal(made.logprobs, np.array([-0.25, np.nan, -0.5], dtype=np.float32))


async def test_an_answer_made_with_two_versions_is_not_used(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client = client_of(server.url, **QUICK)
    client.load(0, folder)
    spans = [{"version": "main/0/a", "start": 0, "end": 1}, {"version": "main/1/a", "start": 1, "end": 3}]
    server.spoil = spoiled(weight_versions=spans)
    with pytest.raises(PolicyServerError, match="sampled with weights main/0/a then main/1/a, expected main/0/a"):
        await ask(client)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refusal_is_never_repeated(server: PlayedServer, client_of: Clients, folder: Path, status: int) -> None:
    # case I4
    client = client_of(server.url)
    client.load(0, folder)
    before = server.count(GENERATE)
    server.spoil = lambda route, answer: status if route == GENERATE else answer
    with pytest.raises(PolicyServerError, match=f"status {status}"):
        await ask(client)
    assert server.count(GENERATE) == before + 1


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
    for _ in range(20):  # one after another, as the turns of other rollouts come: none of them waits once more
        ended += await asyncio.gather(ask(client), return_exceptions=True)
    assert time.monotonic() - start < 5  # a deadline for each would be 12 s
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


@pytest.mark.parametrize("prompt", [CONTEXT - 7, CONTEXT, CONTEXT + 50])
async def test_what_exceeds_the_context_is_not_sent(
    server: PlayedServer, client_of: Clients, folder: Path, prompt: int
) -> None:
    # case I4
    client = client_of(server.url)
    client.load(0, folder)
    before = len(server.asked)
    ids = np.zeros(prompt, dtype=np.int32)
    with pytest.raises(ShapeError, match=f"prompt of {prompt} tokens and max_tokens 8 exceed the context of {CONTEXT}"):
        await client.generate(ids, Sampling(1.0, 8, 1), trajectory_id="t")
    with pytest.raises(ConfigError, match="max_tokens -54"):
        await client.generate(ids, Sampling(1.0, -54, 1), trajectory_id="t")
    assert len(server.asked) == before


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


async def test_the_key_comes_from_the_environment(
    server: PlayedServer, client_of: Clients, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    client = client_of(server.url)
    client.load(0, folder)
    assert server.headers["Authorization"] == "Bearer s3cret"
    server.spoil = lambda route, answer: 401 if route == GENERATE else answer
    with pytest.raises(PolicyServerError, match="set VLLM_API_KEY") as refused:
        await ask(client)
    assert "s3cret" not in str(refused.value)


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


def test_nothing_that_a_client_sends_is_anything_but_json_with_finite_numbers(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client_of(server.url).load(0, folder)
    json.dumps(server.bodies, allow_nan=False)
