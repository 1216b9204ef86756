"""What is sent, and what an answer must have: what lacks something is named, and not asked for again."""

import json
from pathlib import Path

import numpy as np
import pytest

from mgrpo_core.errors import ConfigError, PolicyServerError, ShapeError
from mgrpo_core.rollout.protocols import Sampling
from tests.infra.serving.vllm.played.conftest import PROMPT, QUICK, Clients, ask, spoiled
from tests.infra.serving.vllm.played_server import CONTEXT, GENERATE, SAYS, PlayedServer


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


def test_nothing_that_a_client_sends_is_anything_but_json_with_finite_numbers(
    server: PlayedServer, client_of: Clients, folder: Path
) -> None:
    client_of(server.url).load(0, folder)
    json.dumps(server.bodies, allow_nan=False)
