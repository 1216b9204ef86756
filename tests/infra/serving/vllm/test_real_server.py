"""Against a real vLLM server on the CPU. Skipped where `make vllm` has not been run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.replica import Replica
from infra.serving.vllm.server_api import ServerApi
from infra.serving.vllm.server_process import ServerProcess
from infra.training.load_policy import load_model, load_tokenizer
from mgrpo_core.errors import ConfigError, PolicyServerError
from mgrpo_core.rollout.protocols import Generation, PolicyClient, Sampling

Clients = Callable[..., VllmPolicyClient]
Versions = tuple[Path, Path]

# the server may have to start first: half a minute, or two on busy cores
pytestmark = pytest.mark.timeout(600)
END_OF_TURN = 2


def prompt_of(folder: Path, text: str) -> np.ndarray:
    messages = [{"role": "user", "content": text}]
    rendered = load_tokenizer(folder).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return np.array(load_tokenizer(folder).encode(rendered, add_special_tokens=False), dtype=np.int32)


def trainer_logprobs(folder: Path, prompt: np.ndarray, made: Generation, temperature: float) -> np.ndarray:
    """What the trainer computes: softmax(logits / temperature), at 1 for greedy decoding."""
    ids = torch.from_numpy(np.concatenate([prompt, made.token_ids])).long()
    with torch.inference_mode():
        logits = load_model(folder, torch.float32)(input_ids=ids[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


async def ask(client: PolicyClient, prompt: np.ndarray, *, seed: int = 1, temperature: float = 1.0, tokens: int = 24):
    sampling = Sampling(temperature, tokens, seed, (END_OF_TURN,))
    return await client.generate(prompt, sampling, trajectory_id=f"t{seed}")


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0, 1.3])
async def test_logprobs_are_those_of_the_density_that_sampled(
    server: ServerProcess, client_of: Clients, versions: Versions, temperature: float
) -> None:
    # cases B6 and C8
    client = client_of(server.url)
    assert isinstance(client, PolicyClient)
    client.load(0, versions[0])
    prompt = prompt_of(versions[0], "Which is the capital of Peru?")
    for made in await asyncio.gather(*[ask(client, prompt, seed=s, temperature=temperature) for s in range(6)]):
        assert made.policy_version == 0
        expected = trainer_logprobs(versions[0], prompt, made, temperature)
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4, rtol=0)


async def test_the_same_seed_gives_the_same_tokens_and_other_seeds_give_others(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    # case I5
    client = client_of(server.url)
    client.load(0, versions[0])
    prompt = prompt_of(versions[0], "Say anything.")
    made = await asyncio.gather(*[ask(client, prompt, seed=s, temperature=1.3) for s in (1, 2, 3, 4, 1, 2, 3, 4)])
    said = [tuple(one.token_ids) for one in made]
    assert said[:4] == said[4:]
    assert len(set(said)) == 4


async def test_a_turn_ends_with_its_stop_token_kept_or_cut_at_its_length(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    client = client_of(server.url)
    client.load(0, versions[0])
    prompt = prompt_of(versions[0], "Which is the capital of Peru?")
    whole = await ask(client, prompt, temperature=0.0, tokens=100)
    assert (whole.finish_reason, whole.token_ids[-1]) == ("stop", END_OF_TURN)
    cut = await ask(client, prompt, temperature=0.0, tokens=len(whole.token_ids) - 1)
    assert cut.finish_reason == "length"  # and no end of turn forced onto it
    assert cut.token_ids.tolist() == whole.token_ids[:-1].tolist()
    stop_early = Sampling(0.0, 100, 1, (int(whole.token_ids[1]),))
    early = await client.generate(prompt, stop_early, trajectory_id="t")
    assert early.token_ids.tolist() == whole.token_ids[:2].tolist()


async def test_more_prompt_tokens_than_one_step_takes_are_no_harm(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    # vLLM's CPU build died of a seeded request whose prompt was cut over two steps
    client = client_of(server.url)
    client.load(0, versions[0])
    prompts = [np.random.default_rng(i).integers(10, 2900, 300).astype(np.int32) for i in range(64)]
    made = await asyncio.gather(*[ask(client, prompt, seed=i, tokens=2) for i, prompt in enumerate(prompts)])
    assert len(made) == 64
    assert server.exit_code is None


async def test_weights_change_in_place_and_are_proven(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    # cases I1 and I2: back and forth, with the same prompt each time, so that its keys are cached; the head is tied
    client = client_of(server.url)
    prompt = prompt_of(versions[0], "Which is the capital of Peru? " * 20)
    assert len(prompt) > 128  # a block of the server's cache
    for version in (0, 1, 0, 1):
        client.load(version, versions[version])
        assert client.publications[0].gap.most < 1e-4
        made = await ask(client, prompt)
        assert made.policy_version == version
        expected = trainer_logprobs(versions[version], prompt, made, 1.0)
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4, rtol=0)
    assert client.publications[0].loaded_bytes > 0


def test_a_tied_head_that_stays_behind_stops_the_run_with_both_numbers(
    server: ServerProcess, client_of: Clients, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server.url)
    client.load(0, versions[0])
    with monkeypatch.context() as sabotage:
        # as the trainer wrote it, the head tied
        sabotage.setattr("infra.serving.vllm.client.served_folder", lambda folder, target, *, moved: folder)
        with pytest.raises(PolicyServerError, match=r"policy 'main' version 1 at http.*server -\d.*trainer -\d.*tied"):
            client.load(1, versions[1])
    with pytest.raises(PolicyServerError, match="no weights yet"):
        asyncio.run(ask(client, np.array([5, 6])))
    client.load(1, versions[1])


def test_old_weights_under_a_new_label_stop_the_run(
    server: ServerProcess, client_of: Clients, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server.url)
    client.load(0, versions[0])

    async def acknowledge(self: ServerApi, folder: Path) -> None:
        """And load nothing."""

    with monkeypatch.context() as sabotage:
        sabotage.setattr(ServerApi, "load_weights", acknowledge)
        with pytest.raises(PolicyServerError, match="differ from the trainer's"):
            client.load(1, versions[1])
    client.load(1, versions[1])  # the label was taken back: the weights are loaded now


def test_keys_cached_before_the_update_stop_the_run(
    server: ServerProcess, client_of: Clients, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case I1
    client = client_of(server.url)
    client.load(0, versions[0])

    async def ignore(self: ServerApi) -> None:
        """The reset."""

    with monkeypatch.context() as sabotage:
        sabotage.setattr(ServerApi, "forget_prefixes", ignore)
        with pytest.raises(PolicyServerError, match="keys cached before"):
            client.load(1, versions[1])


def test_a_folder_that_the_server_cannot_read_is_named(
    server: ServerProcess, client_of: Clients, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server.url, label="elsewhere", deadline_s=0.5, connect_timeout_s=0.4)
    load = ServerApi.load_weights

    async def from_another_machine(self: ServerApi, folder: Path) -> None:
        await load(self, Path("/not/here"))

    monkeypatch.setattr(ServerApi, "load_weights", from_another_machine)
    with pytest.raises(PolicyServerError, match=r"asked to load /not/here: a path that the server itself must be able"):
        client.load(1, versions[1])


async def test_a_server_that_another_run_gave_other_weights_is_brought_back(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    ours, theirs = client_of(server.url, label="ours"), client_of(server.url, label="theirs")
    ours.load(0, versions[0])
    theirs.load(1, versions[1])
    prompt = prompt_of(versions[0], "Which is the capital of Peru?")
    made = await ask(ours, prompt)
    assert made.policy_version == 0
    np.testing.assert_allclose(made.logprobs, trainer_logprobs(versions[0], prompt, made, 1.0), atol=1e-4, rtol=0)


def test_a_server_of_another_policy_context_or_tokenizer_is_refused(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    with pytest.raises(ConfigError, match=r"policies\.main\.context: 500, but http.* takes 384 tokens at most"):
        client_of(server.url, context=500).load(0, versions[0])
    other = client_of(server.url)
    other._policy = "sub"
    with pytest.raises(ConfigError, match=r"policies\.sub\.servers: http.* serves main, expected 'sub'"):
        other.load(0, versions[0])
    foreign = client_of(server.url)
    own, foreign._tokenize = foreign._tokenize, lambda text: [3, *foreign_ids(text)]
    foreign_ids = own
    with pytest.raises(ConfigError, match=r"has another tokenizer than the policy's version 0.*part at 0"):
        foreign.load(0, versions[0])


async def test_an_answer_after_a_restart_is_never_taken_for_the_version_in_use(
    server: ServerProcess, client_of: Clients, versions: Versions
) -> None:
    """A server that restarts answers with other weights and the label `default`."""
    client = client_of(server.url)
    client.load(1, versions[1])
    async with httpx.AsyncClient(trust_env=False) as http:
        await http.post(f"{server.url}/update_weight_version", json={"new_version": "default"})
    made = await ask(client, prompt_of(versions[1], "Which is the capital of Peru?"))
    assert made.policy_version == 1
    assert isinstance(client._replicas[0], Replica)
