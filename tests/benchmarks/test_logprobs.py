"""Log-probs at a vocabulary of 150,000: memory does not grow with the batch. Run with `pytest --benchmark-only`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.peak_memory_of_logprobs import VOCABULARY, loss_of, wide_policy

MIB = 2**20


def peak_of(how: str, positions: int) -> int:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.benchmarks.peak_memory_of_logprobs", how, str(positions)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=200)
    return int(done.stdout)


def test_peak_memory_does_not_grow_with_positions_times_vocabulary(benchmark):
    few, many = 512, 2048
    grown = benchmark.pedantic(lambda: peak_of("chunked", many) - peak_of("chunked", few), rounds=1)
    logits = (many - few) * VOCABULARY * 4  # 879 MiB of logits more
    benchmark.extra_info["grown_mib"] = grown / MIB
    benchmark.extra_info["full_mib"] = peak_of("full", many) / MIB
    print({name: round(value, 1) for name, value in benchmark.extra_info.items()})
    assert grown < 0.1 * logits
    assert benchmark.extra_info["full_mib"] * MIB > many * VOCABULARY * 4  # what the chunks avoid is really there


@pytest.mark.parametrize("how", ["chunked", "full"])
def test_speed_of_forward_and_backward_at_a_large_vocabulary(benchmark, how):
    torch.set_num_threads(1)
    policy = wide_policy()

    def pass_both_ways() -> float:
        policy.zero_grad()
        loss = loss_of(policy, how, 512)
        loss.backward()
        return loss.item()

    loss = benchmark.pedantic(pass_both_ways, rounds=3, warmup_rounds=1)
    assert loss == pytest.approx(512 * 11.92, rel=0.01)  # log 150,000 = 11.918: random weights predict nothing
