"""Runs that cannot go on: they stop before harm is done, say why, and exit with 1, 2 or 130."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.flows.program import Ended, Program, Trap
from tests.flows.small_team import MAIN_SAYS, config_of, save_config, save_policy
from tests.flows.stored import iteration_folder, rows_of, versions_of


def _train(program: Program, config: Path, store: Path, *more: object, traps: tuple[Trap, ...] = ()) -> Ended:
    return program.run("train", config, "--run", "r", "--store", store, *more, traps=traps)


@pytest.fixture(scope="session")
def finished(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one iteration, to be copied."""
    store = tmp_path_factory.mktemp("finished")
    ended = _train(program, team / "run.yaml", store)
    assert ended.code == 0, ended.err
    return store


# cases B2, G6
def test_weights_that_turn_to_nan_stop_the_update_before_its_step_with_a_trajectory_named(program, team, tmp_path):
    trap = Trap("infra.training.policy_update:train_policy", action="tests.flows.faulty:turn_to_nan")
    ended = _train(program, team / "run.yaml", tmp_path, traps=(trap,))

    assert ended.code == 1
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("NonFiniteError: trajectory ")
    ids = {
        row["trajectory_id"]
        for agent in ("main", "searcher")
        for row in rows_of(tmp_path, f"trajectories/{agent}-0000")
    }
    assert last.split()[2].rstrip(":") in ids
    assert not (iteration_folder(tmp_path) / "manifest.json").exists()
    made = [policy for policy in ("main", "sub") if len(versions_of(tmp_path, policy)) > 1]
    assert len(made) < 2, "the spoilt policy made a version"

    refused = _train(program, team / "run.yaml", tmp_path)
    assert refused.code == 2
    assert "model.safetensors changed after it was written; restore it." in refused.err
    for policy in ("main", "sub"):
        shutil.copy(team / policy / "model.safetensors", tmp_path / "r/policies" / policy / "00000000")
    again = _train(program, team / "run.yaml", tmp_path)
    assert again.code == 0, again.err


def test_a_policy_broken_from_the_start_makes_no_rollout_and_no_update(program, team, tmp_path):
    from tests.flows.faulty import turn_to_nan

    shutil.copytree(team, tmp_path / "team")
    turn_to_nan(tmp_path / "team/main")
    config = save_config(tmp_path / "run.yaml", config_of(tmp_path / "team", team / "queries.jsonl"))
    ended = _train(program, config, tmp_path / "store")

    assert ended.code == 1
    assert "policy 'main' version 0: logits are not finite" in ended.err
    assert versions_of(tmp_path / "store", "main") == ["00000000"]


def test_ctrl_c_in_the_middle_of_a_rollout_ends_with_130_within_seconds_and_the_same_command_continues(
    program, team, tmp_path, finished
):
    hangs = tmp_path / "hangs"
    trap = Trap("mgrpo_core.rollout.controller:within", call=9, action="hang", file=str(hangs))
    running = program.start("train", team / "run.yaml", "--run", "r", "--store", tmp_path / "store", traps=[trap])
    for _ in range(600):
        if hangs.exists():
            break
        time.sleep(0.1)
    running.signal(signal.SIGINT)
    ended = running.wait(30)

    assert ended.code == 130
    assert "Interrupted. What is staged or committed is kept; the same command continues." in ended.err
    assert not (iteration_folder(tmp_path / "store") / "manifest.json").exists()
    again = _train(program, team / "run.yaml", tmp_path / "store")
    assert again.code == 0, again.err
    ids = [[row["trajectory_id"] for row in rows_of(store, "rewards")] for store in (tmp_path / "store", finished)]
    assert ids[0] == ids[1]


def test_a_store_that_cannot_be_written_is_refused_with_what_to_do(program, team, tmp_path):
    (tmp_path / "file").write_text("no folder")
    ended = _train(program, team / "run.yaml", tmp_path / "file" / "store")
    assert ended.code == 2
    assert "--store" in ended.err
    assert (tmp_path / "file").read_text() == "no folder"


def test_a_run_name_in_use_with_another_config_is_refused_and_nothing_changes(program, team, tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = _content(tmp_path)
    ended = _train(program, team / "run.yaml", tmp_path, "--set", "loss.clip_low=0.1", "--iterations", 2)

    assert ended.code == 2
    assert "run 'r'" in ended.err
    assert "is in use with another config" in ended.err
    assert "--accept-config-change" in ended.err
    assert _content(tmp_path) == before


def test_a_broken_query_file_is_refused_with_the_line_and_no_run_is_made(program, team, tmp_path):
    lines = (team / "queries.jsonl").read_text().splitlines()
    (tmp_path / "queries.jsonl").write_text("\n".join([*lines[:2], '{"question": "cut', *lines[2:]]))
    config = save_config(tmp_path / "run.yaml", config_of(team, tmp_path / "queries.jsonl"))
    ended = _train(program, config, tmp_path / "store")

    assert ended.code == 2
    assert f"{tmp_path / 'queries.jsonl'}, line 3: is no JSON object" in ended.err
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").iterdir())


def test_a_policy_without_a_chat_template_is_refused_and_no_run_is_made(program, team, tmp_path):
    folder = save_policy(tmp_path / "policy", MAIN_SAYS, seed=1)
    (folder / "chat_template.jinja").unlink()
    ended = _train(program, team / "run.yaml", tmp_path / "store", "--set", f"policies.main.init={folder}")

    assert ended.code == 2
    assert str(folder) in ended.err
    assert "chat_template" in ended.err
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize(
    ("file", "said"),
    [("run.json", "version 99, this mgrpo reads up to"), ("iterations/00000000/manifest.json", "manifest version 99")],
)
def test_a_run_written_by_a_newer_mgrpo_is_refused_and_nothing_changes(program, team, tmp_path, finished, file, said):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "r" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    before = _content(tmp_path)
    ended = _train(program, team / "run.yaml", tmp_path, "--iterations", 2)

    assert ended.code == 2
    assert str(path) in ended.err
    assert said in ended.err
    assert "Install a newer mgrpo" in ended.err
    assert _content(tmp_path) == before


def test_a_damaged_manifest_is_named_and_nothing_changes(program, team, tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = iteration_folder(tmp_path) / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    before = _content(tmp_path)
    ended = _train(program, team / "run.yaml", tmp_path, "--iterations", 2)

    assert ended.code == 2
    assert f"{path}: is no manifest" in ended.err
    assert "Restore it from backup" in ended.err
    assert _content(tmp_path) == before


def _content(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}
