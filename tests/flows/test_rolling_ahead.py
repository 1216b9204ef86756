"""Rollouts of the next iterations while this one's policies are updated: `rollout.max_staleness`."""

import json
import signal
from pathlib import Path

import pytest

from infra.replay.iteration import replay_stored
from infra.store.files import StoreFiles
from infra.store.layout import staging_folder
from infra.store.runs import open_store, require_run
from infra.store.staging import staged_groups
from infra.store.verify import verify_run
from tests.flows.program import Program, Trap
from tests.flows.stored import iteration_folder, metrics_of, rows_of, versions_of, weights_sha256

CORRECTED = ("--set", "loss.correction.mode=truncate")


def train(team: Path, store: Path, iterations: int, staleness: int) -> list[str]:
    settings = ["--set", f"rollout.max_staleness={staleness}", *CORRECTED]
    return [str(one) for one in ("train", team / "run.yaml", "--run", "r", "--store", store, *settings,
                                 "--iterations", iterations)]  # fmt: skip


@pytest.fixture(scope="module")
def ahead(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of a run of four iterations, each of which may train on what the weights before sampled."""
    store = tmp_path_factory.mktemp("ahead")
    ended = program.run(*train(team, store, 4, 1))
    assert ended.code == 0, ended.err
    return store


def sampled_by(store: Path, iteration: int, agent: str) -> set[int]:
    return {row["policy_version"] for row in rows_of(store, f"trajectories/{agent}-0000", iteration)}


def test_each_iteration_takes_what_the_weights_before_sampled(ahead):
    from_version = {
        (iteration, policy): json.loads((iteration_folder(ahead, iteration) / "manifest.json").read_text())["policies"][
            policy
        ]["from_version"]
        for iteration in range(4)
        for policy in ("main", "sub")
    }
    behind = []
    for iteration in range(4):
        for agent, policy in (("main", "main"), ("searcher", "sub")):
            now = from_version[iteration, policy]
            versions = sampled_by(ahead, iteration, agent)
            assert all(0 <= now - version <= 1 for version in versions)
            behind += [now - version for version in versions]
            for row in rows_of(ahead, f"trajectories/{agent}-0000", iteration):
                assert {turn["policy_version"] for turn in row["turns"]} == {row["policy_version"]}
    assert 1 in behind
    assert metrics_of(ahead, 0)["main/staleness_max"] == 0.0
    assert max(metrics_of(ahead, iteration)["main/staleness_max"] for iteration in range(1, 4)) == 1.0
    assert len(versions_of(ahead, "main")) > 2


def test_such_a_run_verifies_replays_to_the_bit_and_leaves_nothing_staged(ahead):
    run = require_run(open_store(str(ahead)), "r")
    assert verify_run(run).sound
    for iteration in range(4):
        report = replay_stored(str(ahead), "r", iteration, "update")
        assert report.equal, report.conclusion()
        figures = metrics_of(ahead, iteration)
        if figures["main/staleness_max"]:
            # older weights sampled: that is what the correction is for
            assert figures["update/main/mismatch_max"] > 1e-4
    assert [staged_groups(run.files, "r", number) for number in range(6)] == [{}] * 6


def test_a_part_of_it_that_was_exported_replays_elsewhere(program, ahead, tmp_path):
    late = max(number for number in range(4) if metrics_of(ahead, number)["main/staleness_max"])
    for command in (
        ("export", "r", tmp_path / "part.tar", "--iteration", late, "--store", ahead),
        ("import", tmp_path / "part.tar", "--store", tmp_path / "there"),
    ):
        ended = program.run(*command)
        assert ended.code == 0, ended.err
    report = replay_stored(str(tmp_path / "there"), "r", late, "update")
    assert report.equal, report.conclusion()


def test_rolling_ahead_changes_no_token_of_the_iteration_under_way(program, team, tmp_path, ahead):
    ended = program.run(*train(team, tmp_path, 1, 0))
    assert ended.code == 0, ended.err
    for agent in ("main", "searcher"):
        table = f"trajectories/{agent}-0000"
        plain, overlapped = (
            [(row["trajectory_id"], row["token_ids"]) for row in rows_of(store, table)] for store in (tmp_path, ahead)
        )
        assert plain == overlapped


def test_with_no_staleness_allowed_nothing_is_rolled_out_ahead(program, team, tmp_path):
    traps = [Trap("tasks.roll_out_ahead:roll_out_ahead", "entry", action="kill")]
    ended = program.run(*train(team, tmp_path, 2, 0), traps=traps)
    assert ended.code == 0, ended.err
    assert "main/staleness_max" not in metrics_of(tmp_path, 1)
    for iteration in range(2):
        assert len(sampled_by(tmp_path, iteration, "main")) == 1


def test_the_last_iteration_rolls_out_nothing_that_nobody_asks_for(ahead):
    files = StoreFiles(str(ahead))
    assert files.names(staging_folder("r", 4)) == []


def test_groups_that_are_too_old_are_rolled_out_again(program, team, tmp_path):
    ended = program.run(*train(team, tmp_path, 2, 1), traps=[Trap("flows.compute_iteration:publish_policy")])
    assert ended.code == -signal.SIGKILL
    files = StoreFiles(str(tmp_path))
    before = staged_groups(files, "r", 1)
    assert before.keys() == {0, 1}
    assert all(versions["main"] == 0 for versions in before.values())
    ended = program.run(*train(team, tmp_path, 2, 0), "--accept-config-change")
    assert ended.code == 0, ended.err
    assert "2 staged groups are rolled out again" in ended.out + ended.err
    assert sampled_by(tmp_path, 1, "main") == {1}


@pytest.mark.parametrize(
    "trap",
    [
        Trap("tasks.roll_out:stage_group", "exit", call=3),  # the first group ahead
        Trap("tasks.roll_out_ahead:roll_out_ahead", "exit"),
        Trap("flows.compute_iteration:commit_iteration"),
    ],
)
def test_a_kill_while_it_rolls_ahead_loses_nothing_and_makes_nothing_twice(program, team, tmp_path, trap):
    assert program.run(*train(team, tmp_path, 2, 1), traps=[trap]).code == -signal.SIGKILL
    ended = program.run(*train(team, tmp_path, 2, 1))
    assert ended.code == 0, ended.err
    assert verify_run(require_run(open_store(str(tmp_path)), "r")).sound
    for iteration in range(2):
        assert len(rows_of(tmp_path, "trajectories/main-0000", iteration)) == 8
    assert all(name.split("/")[1] in ("00000000", "00000001", "00000002") for name in weights_sha256(tmp_path))


def test_a_failure_while_it_rolls_ahead_is_told_and_stops_nothing(program, team, tmp_path):
    trap = Trap("tasks.roll_out:stage_group", "entry", call=3, action="raise")
    ended = program.run(*train(team, tmp_path, 2, 1), traps=[trap])
    assert ended.code == 0, ended.err
    assert "Rollouts ahead of r-0000 ended: RuntimeError" in ended.out + ended.err
    assert len(rows_of(tmp_path, "trajectories/main-0000", 1)) == 8


def test_staleness_without_a_correction_is_refused(program, team, tmp_path):
    arguments = ("train", team / "run.yaml", "--store", tmp_path, "--set", "rollout.max_staleness=1")
    ended = program.run(*arguments)
    assert ended.code == 2
    assert "rollout.max_staleness: 1 trains on what older weights sampled" in ended.err
    assert list(tmp_path.iterdir()) == []
