import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from infra.serving.embedded import EmbeddedPolicyClient
from mgrpo_core.errors import ConfigError, PolicyServerError, ShapeError
from mgrpo_core.rollout.protocols import Generation, PolicyClient, Sampling

CONTEXT, VOCABULARY = 160, 97


@pytest.fixture
def client(folder: Path) -> Iterator[EmbeddedPolicyClient]:
    with EmbeddedPolicyClient("main", CONTEXT, threads=1) as client:
        client.load(1, folder)
        yield client


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, VOCABULARY, length).astype(np.int32)


def trainer_logprobs(model: PreTrainedModel, prompt: np.ndarray, sampled: np.ndarray, temperature: float) -> np.ndarray:
    """One plain forward over prompt and completion: what the trainer computes."""
    ids = torch.from_numpy(np.concatenate([prompt, sampled])).long()
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def sampling(seed: int, max_tokens: int = 12, temperature: float = 1.0, stops: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature, max_tokens, seed, stops)


def test_is_a_policy_client(client: EmbeddedPolicyClient) -> None:
    assert isinstance(client, PolicyClient)
    assert (client.policy, client.context_length, client.version) == ("main", CONTEXT, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0, 1.3])
async def test_logprobs_are_those_of_the_trainer(
    client: EmbeddedPolicyClient, model: PreTrainedModel, temperature: float
) -> None:
    # cases B6 and B15: the density that sampled, at its own temperature, in float32
    prompts = [prompt_of(length) for length in (1, 2, 40, 41, 60, 140)]
    made = await asyncio.gather(
        *[client.generate(p, sampling(i, temperature=temperature), trajectory_id=str(i)) for i, p in enumerate(prompts)]
    )
    for prompt, generation in zip(prompts, made, strict=True):
        assert generation.logprobs.dtype == np.float32
        expected = trainer_logprobs(model, prompt, generation.token_ids, temperature)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5, rtol=0)


async def test_greedy_takes_the_likeliest_token(client: EmbeddedPolicyClient, model: PreTrainedModel) -> None:
    prompt = prompt_of(20)
    made = await client.generate(prompt, sampling(3, 8, temperature=0.0), trajectory_id="a")
    ids = list(prompt)
    for token in made.token_ids:
        with torch.inference_mode():
            assert int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()) == token
        ids.append(int(token))


async def test_a_request_gives_the_same_tokens_alone_and_in_any_company(
    client: EmbeddedPolicyClient, folder: Path
) -> None:
    prompts = [prompt_of(10 + 3 * i, seed=i % 4) for i in range(24)]
    together = await asyncio.gather(
        *[client.generate(p, sampling(100 + i, 16), trajectory_id=str(i)) for i, p in enumerate(prompts)]
    )
    with EmbeddedPolicyClient("main", CONTEXT, threads=1) as other:
        other.load(1, folder)
        for i in reversed(range(24)):
            alone = await other.generate(prompts[i], sampling(100 + i, 16), trajectory_id="x")
            assert alone.token_ids.tolist() == together[i].token_ids.tolist()
            np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-5, rtol=0)


async def test_four_seeds_give_four_completions_and_the_same_ones_again(client: EmbeddedPolicyClient) -> None:
    # case I5
    async def group() -> list[tuple[int, ...]]:
        seeds = (4053308001, 688975976, 2603890391, 41540638)
        made = await asyncio.gather(
            *[client.generate(prompt_of(30), sampling(seed), trajectory_id=f"r{seed}") for seed in seeds]
        )
        return [tuple(m.token_ids.tolist()) for m in made]

    first = await group()
    assert len(set(first)) == 4
    assert await group() == first


async def test_a_cut_turn_keeps_what_was_sampled_and_gets_no_end_token(client: EmbeddedPolicyClient) -> None:
    # case B9
    free = await client.generate(prompt_of(9), sampling(5, 12), trajectory_id="a")
    cut = await client.generate(prompt_of(9), sampling(5, 4), trajectory_id="b")
    assert cut.token_ids.tolist() == free.token_ids[:4].tolist()
    assert cut.finish_reason == "length"
    assert len(cut.logprobs) == 4


async def test_a_stop_token_ends_the_turn_and_stays_in_the_ids(client: EmbeddedPolicyClient) -> None:
    free = await client.generate(prompt_of(9), sampling(5, 12), trajectory_id="a")
    ids = free.token_ids.tolist()
    stop = ids[3]
    at = ids.index(stop)
    stopped = await client.generate(prompt_of(9), sampling(5, 12, stops=(96, stop)), trajectory_id="b")
    if 96 not in ids[:at]:
        assert stopped.token_ids.tolist() == ids[: at + 1]
    assert stopped.finish_reason == "stop"


async def test_later_turns_reuse_keys_and_still_agree_with_the_trainer(
    client: EmbeddedPolicyClient, model: PreTrainedModel
) -> None:
    async def trajectory(i: int) -> None:
        context = np.concatenate([prompt_of(20), prompt_of(10, seed=i % 3)])
        for turn in range(3):
            made = await client.generate(context, sampling(10 * i + turn, 5 + i % 4), trajectory_id=f"t{i}")
            expected = trainer_logprobs(model, context, made.token_ids, 1.0)
            np.testing.assert_allclose(made.logprobs, expected, atol=1e-5, rtol=0)
            context = np.concatenate([context, made.token_ids, prompt_of(7 + i, seed=turn)])

    await asyncio.gather(*[trajectory(i) for i in range(12)])


async def test_a_trajectory_whose_history_was_rewritten_agrees_with_the_trainer(
    client: EmbeddedPolicyClient, model: PreTrainedModel
) -> None:
    first = prompt_of(40)
    await client.generate(first, sampling(1), trajectory_id="t")
    rewritten = np.concatenate([first[:15], prompt_of(22, seed=9)])
    made = await client.generate(rewritten, sampling(2), trajectory_id="t")
    np.testing.assert_allclose(
        made.logprobs, trainer_logprobs(model, rewritten, made.token_ids, 1.0), atol=1e-5, rtol=0
    )


async def test_more_requests_than_rows_are_all_served(folder: Path, model: PreTrainedModel) -> None:
    with EmbeddedPolicyClient("main", CONTEXT, threads=1, max_rows=3) as client:
        client.load(1, folder)
        prompts = [prompt_of(12 + i % 5, seed=i % 2) for i in range(20)]
        made = await asyncio.gather(
            *[client.generate(p, sampling(i, 3 + i % 6), trajectory_id=f"{i % 7}") for i, p in enumerate(prompts)]
        )
    for prompt, generation in zip(prompts, made, strict=True):
        expected = trainer_logprobs(model, prompt, generation.token_ids, 1.0)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5, rtol=0)


async def test_new_weights_are_in_effect_and_no_key_of_the_old_ones_survives(
    client: EmbeddedPolicyClient, next_folder: Path, next_model: PreTrainedModel
) -> None:
    # cases I1 and I2: the same prompt and trajectory before and after the update
    prompt = prompt_of(50)
    before = await client.generate(prompt, sampling(1, temperature=0.0), trajectory_id="t")
    client.load(2, next_folder)
    after = await client.generate(prompt, sampling(1, temperature=0.0), trajectory_id="t")
    assert (before.policy_version, after.policy_version) == (1, 2)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    expected = trainer_logprobs(next_model, prompt, after.token_ids, 0.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-5, rtol=0)


async def test_weights_are_not_replaced_under_a_request(client: EmbeddedPolicyClient, next_folder: Path) -> None:
    running = asyncio.create_task(client.generate(prompt_of(5), sampling(1, 100), trajectory_id="t"))
    await asyncio.sleep(0)
    with pytest.raises(PolicyServerError, match="version 2 cannot be loaded while 1 requests are in flight"):
        client.load(2, next_folder)
    assert (await running).policy_version == 1
    client.load(2, next_folder)
    assert client.version == 2


async def test_a_cancelled_caller_is_no_longer_in_flight(client: EmbeddedPolicyClient, next_folder: Path) -> None:
    long = asyncio.create_task(client.generate(prompt_of(5), sampling(1, 150), trajectory_id="t"))
    await asyncio.sleep(0.01)
    long.cancel()
    await asyncio.sleep(0)
    client.load(2, next_folder)
    made = await client.generate(prompt_of(5), sampling(1, 3), trajectory_id="t")
    assert made.policy_version == 2


async def test_a_cancelled_caller_frees_its_row(folder: Path) -> None:
    with EmbeddedPolicyClient("main", CONTEXT, threads=1, max_rows=1) as client:
        client.load(1, folder)
        passes: list[int] = []
        decoder = client._decoder
        assert decoder is not None
        decoder._model.register_forward_pre_hook(lambda *_: passes.append(1))
        long = asyncio.create_task(client.generate(prompt_of(5), sampling(1, 150), trajectory_id="t"))
        queued = asyncio.create_task(client.generate(prompt_of(6), sampling(1, 150), trajectory_id="u"))
        await asyncio.sleep(0.01)
        long.cancel()
        queued.cancel()
        made = await asyncio.wait_for(client.generate(prompt_of(7), sampling(1, 3), trajectory_id="v"), timeout=60)
        assert len(made.token_ids) == 3
        assert long.cancelled()
        assert queued.cancelled()
        assert len(passes) < 100  # 150 were asked for, twice


async def test_the_event_loop_stays_free_while_tokens_are_made(client: EmbeddedPolicyClient) -> None:
    running = asyncio.gather(
        *[client.generate(prompt_of(30), sampling(i, 120), trajectory_id=str(i)) for i in range(16)]
    )
    turns = 0
    while not running.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5
    assert all(len(m.token_ids) == 120 for m in await running)


@pytest.mark.parametrize(("length", "wanted"), [(150, 11), (160, 1), (200, 5)])
async def test_a_request_beyond_the_context_is_the_callers_bug(
    client: EmbeddedPolicyClient, length: int, wanted: int
) -> None:
    # case I4: the client never shortens a request on its own
    with pytest.raises(ShapeError, match="exceed the context of 160"):
        await client.generate(prompt_of(length), sampling(1, wanted), trajectory_id="t")


async def test_a_request_may_fill_the_context_to_the_last_token(
    client: EmbeddedPolicyClient, model: PreTrainedModel
) -> None:
    prompt = prompt_of(150)
    made = await client.generate(prompt, sampling(1, 10), trajectory_id="t")
    assert len(made.token_ids) == 10
    np.testing.assert_allclose(made.logprobs, trainer_logprobs(model, prompt, made.token_ids, 1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "wanted", "error", "words"),
    [
        (np.array([], dtype=np.int32), sampling(1), ShapeError, "T at least 1"),
        (np.array([3, 97], dtype=np.int32), sampling(1), ConfigError, "expected 0 to 96"),
        (np.array([-1], dtype=np.int32), sampling(1), ConfigError, "expected 0 to 96"),
        (np.array([1], dtype=np.int32), sampling(1, 0), ConfigError, "max_tokens 0"),
        (np.array([1], dtype=np.int32), sampling(1, temperature=-0.1), ConfigError, "temperature -0.1"),
        (np.array([1], dtype=np.int32), sampling(1, temperature=float("nan")), ConfigError, "temperature nan"),
    ],
)
async def test_a_wrong_request_is_refused_before_it_reaches_the_batch(
    client: EmbeddedPolicyClient, prompt: np.ndarray, wanted: Sampling, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await client.generate(prompt, wanted, trajectory_id="t")


async def test_broken_weights_give_an_error_with_their_version_and_never_a_sample(
    client: EmbeddedPolicyClient, model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    # cases B2/I3: a NaN in one weight
    from transformers import Qwen3ForCausalLM

    broken = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path)
    client.load(7, tmp_path)
    made = await asyncio.gather(
        *[client.generate(prompt_of(5), sampling(i), trajectory_id=str(i)) for i in range(3)],
        return_exceptions=True,
    )
    assert all(isinstance(m, PolicyServerError) and "'main' version 7: logits are not finite" in str(m) for m in made)
    client.load(8, folder)
    assert isinstance(await client.generate(prompt_of(5), sampling(1), trajectory_id="0"), Generation)


async def test_a_failure_of_the_worker_reaches_every_caller_and_the_next_request_works(
    client: EmbeddedPolicyClient,
) -> None:
    good = await client.generate(prompt_of(5), sampling(1), trajectory_id="a")
    decoder = client._decoder
    assert decoder is not None
    hook = decoder._model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no more")))
    made = await asyncio.wait_for(
        asyncio.gather(
            *[client.generate(prompt_of(5), sampling(i), trajectory_id=str(i)) for i in range(5)],
            return_exceptions=True,
        ),
        timeout=60,
    )
    assert all(isinstance(m, PolicyServerError) and "MemoryError: no more" in str(m) for m in made)
    hook.remove()
    assert client._decoder is not None
    assert client._decoder.active == 0
    again = await client.generate(prompt_of(5), sampling(1), trajectory_id="a")
    assert again.token_ids.tolist() == good.token_ids.tolist()


async def test_closing_answers_whoever_still_waits(folder: Path) -> None:
    client = EmbeddedPolicyClient("main", CONTEXT, threads=1)
    client.load(1, folder)
    running = asyncio.create_task(client.generate(prompt_of(5), sampling(1, 150), trajectory_id="t"))
    await asyncio.sleep(0.01)
    client.close()
    client.close()
    with pytest.raises(PolicyServerError, match="closed"):
        await asyncio.wait_for(running, timeout=60)
    with pytest.raises(PolicyServerError, match="closed"):
        await client.generate(prompt_of(5), sampling(1), trajectory_id="t")


async def test_generating_before_weights_are_loaded_says_so() -> None:
    with (
        EmbeddedPolicyClient("main", CONTEXT) as client,
        pytest.raises(PolicyServerError, match=r"call load\(version, folder\)"),
    ):
        await client.generate(prompt_of(5), sampling(1), trajectory_id="t")


def test_a_context_beyond_the_models_is_refused_at_load(folder: Path) -> None:
    with EmbeddedPolicyClient("main", 161) as client, pytest.raises(ConfigError, match="was built for 160"):
        client.load(1, folder)


def test_one_client_serves_event_loops_one_after_the_other(client: EmbeddedPolicyClient) -> None:
    async def once() -> list[int]:
        return (await client.generate(prompt_of(5), sampling(1), trajectory_id="t")).token_ids.tolist()

    assert asyncio.run(once()) == asyncio.run(once())
