"""The vLLM client against the bare servers, and vLLM against the engine in this process: ratios, on one machine.

`make bench BENCH=tests/benchmarks/test_vllm.py`, after `make vllm`. Both sides of a ratio run in turn, several times:
they share the machine's mood. The prefix caches are dropped before each.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from infra.quickstart.builtin import builtin_policy
from infra.serving.core_share import cores
from infra.serving.embedded import EmbeddedPolicyClient
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.local_servers import _free_ports
from infra.serving.vllm.server_process import ServerProcess
from infra.store.adapter_folder import link_base
from infra.training.adapters import put_adapter, save_adapter, trained_parameters
from infra.training.load_policy import load_model, load_tokenizer
from mgrpo_core.config import LoraConfig, ServingConfig
from mgrpo_core.rollout.protocols import PolicyClient, Sampling
from tests.servers.vllm_build import vllm_build

pytestmark = pytest.mark.timeout(1800)

CONTEXT, VOCABULARY = 384, 2000
CLIENT_ROUNDS, ROUNDS = 16, 3
# vLLM hangs up on a connection that was idle for 5 s.
IDLE_S = 3.0
# A rollout: main, sub, sub, main, sub, sub, main. Each turn samples, and the next prompt has a reply after it.
TURNS = ("main", "sub", "sub", "main", "sub", "sub", "main")
PROMPT, SAMPLED, REPLY = 100, 16, 32

Generate = Callable[[str, np.ndarray, int, str], Awaitable[int]]
"""Policy, prompt, seed and rollout -> how many tokens came of it: SAMPLED."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of the quickstart's two policies, a server each."""
    # one thread each, as the engine in this process gets
    build = vllm_build(servers=cores())
    logs = tmp_path_factory.mktemp("logs")
    running = {}
    try:
        for policy, port in zip(("main", "sub"), _free_ports(2), strict=True):
            settings = ServerSettings(policy, folder_of(policy), "float32", CONTEXT, "127.0.0.1", port)
            running[policy] = ServerProcess(build, settings, logs / policy)
        for process in running.values():
            process.wait_until_it_answers(900)
        yield {policy: process.url for policy, process in running.items()}
    finally:
        for process in running.values():
            process.stop()


@pytest.fixture(scope="module")
def clients(servers: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmPolicyClient]]:
    made = {}
    for policy, url in servers.items():
        made[policy] = client_of(policy, url, tmp_path_factory.mktemp("served"))
        made[policy].load(0, folder_of(policy))
    yield made
    for client in made.values():
        client.close()


def client_of(policy: str, url: str, scratch: Path) -> VllmPolicyClient:
    """Of one server. Version 0 has all weights, the others are adapters on it."""
    tokenizer = load_tokenizer(folder_of(policy))
    base = f"{policy}/0/benchmark"
    return VllmPolicyClient(
        policy,
        CONTEXT,
        [url],
        dtype="float32",
        serving=ServingConfig(),
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False),
        label_of=lambda version: f"{base}+{version}/benchmark" if version else base,
        scratch=scratch,
    )


def folder_of(policy: str) -> Path:
    return Path(builtin_policy(f"builtin:quickstart/{policy}"))


def ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(10, VOCABULARY, count).astype(np.int32)


def prompts_of(rollout: int) -> list[np.ndarray]:
    """Of its turns: main's grow by what it said and was told, each pair of sub's turns is an invocation of its own."""
    rng = np.random.default_rng(rollout)
    main, sub, prompts = ids(rng, PROMPT), np.zeros(0, np.int32), list[np.ndarray]()
    for turn, policy in enumerate(TURNS):
        if policy == "main":
            prompts.append(main)
            main, sub = np.concatenate([main, ids(rng, SAMPLED + REPLY)]), np.zeros(0, np.int32)
        else:
            sub = np.concatenate([sub, ids(rng, SAMPLED + REPLY)]) if len(sub) else ids(rng, PROMPT)
            prompts.append(sub)
        assert len(prompts[turn]) + SAMPLED <= CONTEXT
    return prompts


async def roll_out(generate: Generate, rollouts: int) -> None:
    """Rollouts side by side, the turns of each one after another."""

    async def one(rollout: int) -> None:
        for turn, (policy, prompt) in enumerate(zip(TURNS, prompts_of(rollout), strict=True)):
            assert await generate(policy, prompt, 1000 * rollout + turn, f"r{rollout}") == SAMPLED

    await asyncio.gather(*[one(rollout) for rollout in range(rollouts)])


def through(clients: dict[str, VllmPolicyClient]) -> Generate:
    async def generate(policy: str, prompt: np.ndarray, seed: int, rollout: str) -> int:
        made = await clients[policy].generate(prompt, Sampling(1.0, SAMPLED, seed), trajectory_id=rollout)
        return len(made.token_ids)

    return generate


def bare(http: aiohttp.ClientSession, servers: dict[str, str]) -> Generate:
    """As little as a load generator can do: a request, and its JSON. `/v1/completions` is as fast, to a percent."""

    async def generate(policy: str, prompt: np.ndarray, seed: int, rollout: str) -> int:
        asked = {"max_tokens": SAMPLED, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        asked |= {"logprobs": 0, "detokenize": False}
        body = {"model": policy, "token_ids": prompt.tolist(), "sampling_params": asked}
        while True:
            try:
                async with http.post(f"{servers[policy]}/inference/v1/generate", json=body) as response:
                    answer = await response.json()
            except aiohttp.ServerDisconnectedError:  # idle for too long after all, on a busy machine
                continue
            assert response.status == 200, answer
            return len(answer["choices"][0]["token_ids"])

    return generate


def forget_prefixes(servers: dict[str, str]) -> None:
    for url in servers.values():
        httpx.post(f"{url}/reset_prefix_cache", trust_env=False, timeout=60).raise_for_status()


def test_rollouts_through_the_client_against_the_bare_servers(
    benchmark: BenchmarkFixture, servers: dict[str, str], clients: dict[str, VllmPolicyClient]
) -> None:
    """Two agents on two servers, turns interleaved, same prompts and lengths. Wanted: 0.9 of the bare throughput."""
    rollouts = 32

    async def bare_rollouts() -> None:
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(600)) as http:
            await roll_out(bare(http, servers), rollouts)

    def seconds(work: Callable[[], Any]) -> float:
        forget_prefixes(servers)
        start = time.perf_counter()
        asyncio.run(work())
        return time.perf_counter() - start

    def ours() -> Any:
        return roll_out(through(clients), rollouts)

    taken: dict[str, list[float]] = {"client": [], "bare": []}
    sides = [("client", ours), ("bare", bare_rollouts)]
    seconds(ours)
    for number in range(CLIENT_ROUNDS):
        for name, work in sides if number % 2 else reversed(sides):  # a machine that slows down favours who comes first
            taken[name].append(seconds(work))
    benchmark.pedantic(lambda: asyncio.run(ours()), setup=lambda: forget_prefixes(servers), rounds=1)
    tokens = rollouts * len(TURNS) * SAMPLED
    rates = {name: tokens / median(times) for name, times in taken.items()}
    ratios = [other / own for own, other in zip(*taken.values(), strict=True)]
    benchmark.extra_info |= {name: round(rate) for name, rate in rates.items()} | {"ratio": round(median(ratios), 3)}
    print(f"\n{rollouts} rollouts: " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items()))
    print(f"client over bare: {median(ratios):.2f}; by round {', '.join(f'{one:.2f}' for one in ratios)}")


def test_publishing_an_adapter(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Rank 16 on all linear maps of the quickstart's policy: from the version's folder to its proof. Wanted: 1 s."""
    base, lora = folder_of("main"), LoraConfig(rank=16, alpha=32.0)
    folders = [base, *(adapter_on(base, lora, tmp_path / f"{seed}", seed) for seed in range(1, 8))]
    settings = ServerSettings("main", base, "float32", CONTEXT, "127.0.0.1", _free_ports(1)[0], lora_rank=lora.rank)
    with ServerProcess(vllm_build(servers=cores()), settings, tmp_path / "log") as process:
        process.wait_until_it_answers(900)
        with client_of("main", process.url, tmp_path / "served") as client:
            versions = iter(enumerate(folders))

            def publish() -> None:
                client.load(*next(versions))

            publish()  # the base
            publish()  # whoever comes first warms up
            benchmark.pedantic(publish, rounds=len(folders) - 2)


def adapter_on(base: Path, lora: LoraConfig, folder: Path, seed: int) -> Path:
    """A version with an effect."""
    model = load_model(base, torch.float32)
    put_adapter(model, lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in trained_parameters(model).items():
            if ".lora_B." in name:
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
    folder.mkdir()
    save_adapter(folder, lora, trained_parameters(model))
    link_base(folder, base)
    return folder


@pytest.mark.parametrize("rollouts", [1, 32, 128])
def test_the_engine_in_this_process_against_a_server(
    benchmark: BenchmarkFixture, clients: dict[str, VllmPolicyClient], servers: dict[str, str], rollouts: int
) -> None:
    """The same policy and prompts, a thread each: tokens/s of one turn of many rollouts."""
    turns = {1: 8, 32: 2, 128: 1}[rollouts]

    async def sample(client: PolicyClient) -> None:
        async def one(rollout: int) -> None:
            for turn in range(turns):
                rng = np.random.default_rng([rollout, turn])
                sampling = Sampling(1.0, SAMPLED, 1000 * rollout + turn)
                await client.generate(ids(rng, PROMPT), sampling, trajectory_id=f"r{rollout}")

        await asyncio.gather(*[one(rollout) for rollout in range(rollouts)])

    def seconds(client: PolicyClient) -> float:
        start = time.perf_counter()
        asyncio.run(sample(client))
        return time.perf_counter() - start

    taken: dict[str, list[float]] = {"in process": [], "vLLM": []}
    with EmbeddedPolicyClient("main", CONTEXT, threads=1) as embedded:
        for number in range(ROUNDS + 1):
            embedded.load(number, folder_of("main"))
            forget_prefixes(servers)
            for name, client in (("in process", embedded), ("vLLM", clients["main"])):
                spent = seconds(client)
                taken[name] += [spent] if number else []  # the first warms up
    benchmark.pedantic(lambda: asyncio.run(sample(clients["main"])), setup=lambda: forget_prefixes(servers), rounds=1)
    tokens = rollouts * turns * SAMPLED
    rates = {name: tokens / median(times) for name, times in taken.items()}
    benchmark.extra_info |= {name: round(rate) for name, rate in rates.items()}
    print(f"\n{rollouts} rollouts: " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items()))
