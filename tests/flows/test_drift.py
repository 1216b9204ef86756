"""A run whose sampler and trainer drift apart says so, with advice, in the iteration in which that can be told."""

import pytest

from tests.flows.program import Trap
from tests.flows.stored import metrics_of


def test_the_policy_whose_engine_drifts_is_named_with_what_to_do_about_it(program, team, tmp_path):
    ended = program.run(
        *("train", team / "run.yaml", "--run", "r", "--store", tmp_path, "--iterations", 6),
        *("--set", "policies.main.optimizer.lr=1e-6", "--set", "agents.searcher.trainable=false"),
        traps=[Trap("infra.resources:engine_of", action="tests.flows.faulty:drift")],
    )
    assert ended.code == 0, ended.err
    figures = [metrics_of(tmp_path, iteration)["update/main/mismatch_mean"] for iteration in range(6)]
    assert figures == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.06], abs=1e-4)
    # The median of three iterations, 0.05, against that of the three before, 0.02: after five there are but two before.
    *before, last = (line for line in ended.err.splitlines() if line.startswith("r-000"))
    assert ["mismatch grows" in line for line in before] == [False] * 5
    assert "! policy main: mismatch grows, 0.02 → 0.05" in last
    (warning,) = (line for line in ended.err.splitlines() if "drift apart" in line)
    assert "Policy 'main': sampler and trainer drift apart." in warning
    assert "set loss.correction.mode: truncate" in warning
    assert "Lower policies.main.optimizer.lr." in warning
