"""The command line: what programs read from it, and its exit codes."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.flows.program import Program
from tests.flows.small_team import config_of, save_config


@pytest.fixture(scope="session")
def finished(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run `r` of two iterations, and its config, which names held-out questions."""
    store = tmp_path_factory.mktemp("finished")
    config = config_of(team, team / "queries.jsonl")
    config["data"]["held_out"] = str(team / "queries.jsonl")
    path = save_config(store / "run.yaml", config)
    ended = program.run("train", path, "--run", "r", "--store", store, "--iterations", 2, "--json")
    assert ended.code == 0, ended.err
    done = json.loads(ended.out)
    assert (done["run"], done["iterations"], done["computed"]) == ("r", 2, 2)
    return store


def test_check_prints_a_config_that_is_the_same_config(program, team, tmp_path):
    shown = program.run("check", team / "run.yaml", "--set", "loss.clip_low=0.1")
    assert shown.code == 0
    resolved = yaml.safe_load(shown.out)
    assert resolved["loss"]["clip_low"] == 0.1
    assert resolved["agents"]["main"]["d"] == 8, "defaults are filled in"
    again = program.run("check", save_config(tmp_path / "resolved.yaml", resolved), "--json")
    assert json.loads(again.out) == resolved


def test_a_wrong_key_is_refused_with_2_and_the_right_one(program, team, tmp_path):
    for command in (["check", team / "run.yaml"], ["train", team / "run.yaml", "--store", tmp_path / "store"]):
        ended = program.run(*command, "--set", "loss.clip_lo=0.1")
        assert ended.code == 2
        assert "loss.clip_lo: no such setting. Did you mean clip_low?" in ended.err
    assert not (tmp_path / "store").exists()


def test_training_a_run_that_has_all_its_iterations_computes_nothing(program, finished):
    ended = program.run("train", finished / "run.yaml", "--run", "r", "--store", finished, "--iterations", 2, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["computed"] == 0


def test_runs_lists_iterations_and_policy_versions(program, finished):
    ended = program.run("runs", "--store", finished, "--json")
    assert ended.code == 0
    (found,) = json.loads(ended.out)
    assert (found["run"], found["iterations"], found["problem"]) == ("r", 2, None)
    assert set(found["policies"]) == {"main", "sub"}


def test_verify_finds_a_whole_run_sound(program, finished):
    ended = program.run("verify", "r", "--store", finished, "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["sound"]
    assert report["iterations"] == 2


@pytest.mark.parametrize(
    "file", ["iterations/00000000/trajectories/main-0000.parquet", "policies/main/00000001/model.safetensors"]
)
def test_verify_names_a_file_of_which_one_bit_has_turned(program, finished, tmp_path, file):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "r" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ended = program.run("verify", "r", "--store", tmp_path)
    assert ended.code == 1
    assert file.removeprefix("iterations/00000000/") in ended.out
    assert "changed after it was" in ended.out


def test_a_run_that_is_not_there_is_refused_with_2(program, finished):
    ended = program.run("verify", "other", "--store", finished)
    assert ended.code == 2
    assert "other" in ended.err


def test_evaluate_gives_rates_and_intervals_of_start_and_newest_sampled_and_greedy(program, finished):
    ended = program.run("evaluate", "r", "--store", finished, "--questions", 4, "--samples", 2, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["run"], found["after"]) == ("r", 2)
    assert [(one["temperature"], one["samples"]) for one in found["held_out"]] == [(1.0, 2), (0.0, 1)]
    for one in found["held_out"]:
        for rate in (one["start"], one["later"]):
            assert 0 <= rate["low"] <= rate["rate"] <= rate["high"] <= 1
            assert rate["questions"] == 4
        difference = one["difference"]
        assert difference["difference"] == pytest.approx(one["later"]["rate"] - one["start"]["rate"])
        assert difference["low"] <= difference["difference"] <= difference["high"]
    again = program.run("evaluate", "r", "--store", finished, "--questions", 4, "--samples", 2, "--json")
    assert json.loads(again.out) == found


def test_evaluating_after_more_iterations_than_there_are_is_refused_with_2(program, finished):
    ended = program.run("evaluate", "r", "--store", finished, "--iteration", 3)
    assert ended.code == 2
    assert "has 2 iterations, 3 were asked for" in ended.err


def test_the_version_is_that_of_the_installed_package(program):
    ended = program.run("--version")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"mgrpo {importlib.metadata.version('mgrpo')}\n"


def test_the_module_runs_as_a_program_of_its_own(team):
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "check", team / "run.yaml", "--set", "seed=-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "seed: -1 is refused" in done.stderr
