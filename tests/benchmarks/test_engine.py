"""The embedded engine against what transformers offers, in one run: `pytest tests/benchmarks --benchmark-only`.

Without `--benchmark-only` these are skipped. Ratios, not seconds, are asserted: both sides share the machine's mood.
"""

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infra.serving.embedded import EmbeddedPolicyClient
from mgrpo_core.rollout.protocols import Sampling

CONTEXT, VOCABULARY, ROLLOUTS, QUERIES = 512, 2048, 128, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of one million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def client(folder: Path) -> Iterator[EmbeddedPolicyClient]:
    with EmbeddedPolicyClient("main", CONTEXT, threads=1) as client:
        client.load(0, folder)
        yield client


@pytest.fixture
def stock(folder: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count).astype(np.int32)


def first_turns() -> tuple[list[np.ndarray], list[int]]:
    """128 prompts of 100 tokens, 16 different, and how long each turn gets: 4 to 24 tokens."""
    rng = np.random.default_rng(0)
    system = ids(rng, 60)
    queries = [np.concatenate([system, ids(rng, 40)]) for _ in range(QUERIES)]
    return [queries[i % QUERIES] for i in range(ROLLOUTS)], [int(n) for n in rng.integers(4, 25, ROLLOUTS)]


def sample_all(client: EmbeddedPolicyClient, prompts: list[np.ndarray], lengths: list[int]) -> None:
    async def together() -> None:
        made = await asyncio.gather(
            *[
                client.generate(p, Sampling(1.0, n, i), trajectory_id=str(i))
                for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )
        assert [len(m.token_ids) for m in made] == lengths

    asyncio.run(together())


def best_of(times: int, work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def compare(
    benchmark: BenchmarkFixture, ours: Callable[[], None], setup: Callable[[], None], theirs: Callable[[], None]
) -> float:
    """Seconds of the other over ours, best of a few each; kept beside the figures."""
    theirs()
    other = best_of(2, theirs)
    benchmark.pedantic(ours, setup=setup, rounds=5, warmup_rounds=1)
    ratio = other / benchmark.stats.stats.min
    benchmark.extra_info["times_faster"] = round(ratio, 2)
    print(f"\n{ratio:.1f} times faster: {benchmark.stats.stats.min:.3f} s against {other:.3f} s")
    return ratio


def test_is_faster_than_generate(
    benchmark: BenchmarkFixture, client: EmbeddedPolicyClient, stock: PreTrainedModel, folder: Path
) -> None:
    prompts, lengths = first_turns()
    batch = torch.from_numpy(np.stack(prompts)).long()

    def generate() -> None:
        # The batch runs until its longest row ends; scores are what log-probabilities come from.
        with torch.inference_mode():
            stock.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                top_k=0,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )

    ratio = compare(benchmark, lambda: sample_all(client, prompts, lengths), lambda: client.load(0, folder), generate)
    assert ratio > 1.5


def test_is_faster_than_continuous_batching_of_transformers(
    benchmark: BenchmarkFixture, client: EmbeddedPolicyClient, stock: PreTrainedModel, folder: Path
) -> None:
    prompts, lengths = first_turns()
    settings = GenerationConfig(do_sample=True, max_new_tokens=max(lengths), top_k=0, eos_token_id=-1, pad_token_id=0)
    # The fastest of the settings tried: the defaults (pages of 256, room for a large GPU) take three times as long.
    batching = ContinuousBatchingConfig(return_logprobs=True, max_batch_tokens=512, num_blocks=256, block_size=32)

    def generate_batch() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = stock.generate_batch(
                [p.tolist() for p in prompts],
                generation_config=settings,
                continuous_batching_config=batching,
                progress_bar=False,
            )
        assert len(made) == len(prompts)

    ratio = compare(
        benchmark, lambda: sample_all(client, prompts, lengths), lambda: client.load(0, folder), generate_batch
    )
    assert ratio > 1.5


def test_keeping_prefixes_pays(benchmark: BenchmarkFixture, client: EmbeddedPolicyClient, folder: Path) -> None:
    """The same second turns with their first turn still in the cache, and after it was dropped."""
    prompts, lengths = first_turns()
    rng = np.random.default_rng(1)
    later = [np.concatenate([p, ids(rng, 30)]) for p in prompts]
    short = [6] * ROLLOUTS

    def first_turn() -> None:
        client.load(0, folder)
        sample_all(client, prompts, lengths)

    def forgotten() -> float:
        client.load(0, folder)
        # Prompts that share nothing: what an engine without kept prefixes would compute.
        strangers = [np.concatenate([ids(rng, len(prompts[0])), p[-30:]]) for p in later]
        begin = time.perf_counter()
        sample_all(client, strangers, short)
        return time.perf_counter() - begin

    first_turn()
    other = min(forgotten() for _ in range(3))
    benchmark.pedantic(lambda: sample_all(client, later, short), setup=first_turn, rounds=5, warmup_rounds=1)
    ratio = other / benchmark.stats.stats.min
    benchmark.extra_info["times_faster"] = round(ratio, 2)
    print(f"\n{ratio:.1f} times faster: {benchmark.stats.stats.min:.3f} s against {other:.3f} s")
    assert ratio > 1.5


def test_an_iteration_of_rollouts_with_two_policies(benchmark: BenchmarkFixture, folder: Path) -> None:
    """128 rollouts × (3 main turns + 2 × 2 sub-agent turns), 3 to 11 tokens a turn, tool replies of 100 tokens."""
    setup_rng = np.random.default_rng(0)
    main_system, sub_system = ids(setup_rng, 60), ids(setup_rng, 50)
    questions = [ids(setup_rng, 30) for _ in range(QUERIES)]
    sampled: list[int] = []

    async def turn(
        client: EmbeddedPolicyClient, context: np.ndarray, name: str, rng: np.random.Generator
    ) -> np.ndarray:
        wanted = Sampling(1.0, int(rng.integers(3, 12)), int(rng.integers(2**60)))
        made = await client.generate(context, wanted, trajectory_id=name)
        sampled.append(len(made.token_ids))
        return np.concatenate([context, made.token_ids])

    async def delegate(client: EmbeddedPolicyClient, name: str, rng: np.random.Generator) -> np.ndarray:
        context = await turn(client, np.concatenate([sub_system, ids(rng, 20)]), name, rng)
        return (await turn(client, np.concatenate([context, ids(rng, 100)]), name, rng))[-8:]

    async def roll_out(main: EmbeddedPolicyClient, sub: EmbeddedPolicyClient, query: int, rollout: int) -> None:
        rng, name = np.random.default_rng([query, rollout]), f"{query}/{rollout}"
        context = np.concatenate([main_system, questions[query]])
        for call in range(2):
            context = await turn(main, context, name, rng)
            context = np.concatenate([context, await delegate(sub, f"{name}/{call}", rng), ids(rng, 4)])
        await turn(main, context, name, rng)

    async def iteration(main: EmbeddedPolicyClient, sub: EmbeddedPolicyClient) -> None:
        await asyncio.gather(*[roll_out(main, sub, i % QUERIES, i // QUERIES) for i in range(ROLLOUTS)])

    with EmbeddedPolicyClient("main", CONTEXT) as main, EmbeddedPolicyClient("sub", CONTEXT) as sub:

        def fresh() -> None:
            main.load(0, folder)
            sub.load(0, folder)
            sampled.clear()

        benchmark.pedantic(lambda: asyncio.run(iteration(main, sub)), setup=fresh, rounds=5, warmup_rounds=2)
    assert len(sampled) == ROLLOUTS * 7
    rate = sum(sampled) / benchmark.stats.stats.min
    benchmark.extra_info["tokens_per_second"] = round(rate)
    print(f"\n{sum(sampled)} tokens in {benchmark.stats.stats.min:.2f} s: {rate:.0f} tokens/s")
