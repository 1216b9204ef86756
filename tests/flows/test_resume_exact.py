"""A run that stops and goes on is the run that never stopped: every table, weight, moment and metric (H1, H3, H6)."""

import shutil
from pathlib import Path

import pytest

from tests.flows.program import Program, Trap
from tests.flows.stored import manifest_of, metrics_of, rows_of, tables_sha256, weights_sha256


def _train(program: Program, team: Path, store: Path, iterations: int, *traps: Trap) -> None:
    # One rollout at a time, so that log-probs agree to the last bit. With warm-up: the schedule must go on as well.
    ended = program.run(
        *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", iterations),
        *("--set", "rollout.concurrency=1", "--set", "policies.main.optimizer.warmup_steps=3"),
        traps=traps,
    )
    assert ended.code == 0, ended.err


@pytest.fixture(scope="session")
def straight(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of four iterations in a row."""
    store = tmp_path_factory.mktemp("straight")
    _train(program, team, store, 4)
    return store


# case H1: six queries, two an iteration, so the first epoch ends with the third iteration
@pytest.mark.parametrize("first", [2, 3], ids=["in the middle of an epoch", "at its end"])
def test_a_run_resumed_in_another_process_equals_the_straight_one_bit_for_bit(program, team, tmp_path, straight, first):
    _train(program, team, tmp_path, first)
    _train(program, team, tmp_path, 4)

    assert weights_sha256(tmp_path) == weights_sha256(straight)
    for iteration in range(4):
        assert tables_sha256(tmp_path, iteration) == tables_sha256(straight, iteration)
        assert metrics_of(tmp_path, iteration) == metrics_of(straight, iteration)
        assert manifest_of(tmp_path, iteration)["cursor"] == manifest_of(straight, iteration)["cursor"]


def test_an_epoch_asks_every_query_once_before_the_next_begins(straight):
    asked = [row["query_id"] for iteration in range(4) for row in rows_of(straight, "queries", iteration)]
    assert sorted(asked[:6]) == [f"q{number}" for number in range(6)]
    assert [row["epoch"] for row in rows_of(straight, "queries", 3)] == [1, 1]


# cases H5, H6: the newest pair that is whole is the one before
def test_a_version_lost_by_one_policy_takes_both_back_to_the_newest_pair(program, team, tmp_path, straight):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    sub = sorted((tmp_path / "r/policies/sub").iterdir())
    (sub[-1] / "model.safetensors").write_bytes(b"")
    made = manifest_of(tmp_path, 3)["policies"]
    _train(program, team, tmp_path, 4)

    assert manifest_of(tmp_path, 3)["policies"] == made
    assert weights_sha256(tmp_path) == weights_sha256(straight)
    assert list((tmp_path / "r/aside").iterdir())
