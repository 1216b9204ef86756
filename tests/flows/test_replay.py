"""Replay: a fresh run is the same to the bit, damage is told of where it is, and nothing is ever written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.replay import replay
from infra.portable.exporting import export_stored
from infra.replay.iteration import replay_stored
from infra.replay.verdicts import Outcome, ReplayReport
from infra.replay.what_if import what_if_stored
from infra.store.runs import open_store, require_run
from infra.store.verify import verify_run
from mgrpo_core.errors import ConfigError
from tests.flows.program import Program
from tests.flows.stored import iteration_folder
from tests.infra.replay.damage import ITERATION, KINDS, json_of, rows_of
from tests.servers.seaweedfs import seaweedfs_endpoint

__all__ = ["seaweedfs_endpoint"]

ROOT = Path(__file__).parents[2]
POLICIES = ("main", "sub")


@pytest.fixture(scope="session")
def trained(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a fresh run of three iterations: a judge by rule, two minibatches, more slots than delegations."""
    store = tmp_path_factory.mktemp("trained")
    reward = "{format: 0.3, main_correct: 0.4, expert: 0.3}"
    ended = program.run(
        *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", 3),
        *("--set", "agents.searcher.judge=support", "--set", f"agents.searcher.reward={reward}"),
        *("--set", "agents.searcher.d=4", "--set", "update.optimizer_steps=2"),
    )
    assert ended.code == 0, ended.err
    return store


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The same store, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "store"))


def outcomes(report: ReplayReport) -> dict[str, Outcome]:
    return {verdict.stage: verdict.outcome for verdict in report.verdicts}


@pytest.mark.parametrize("iteration", range(3))
def test_every_iteration_of_a_fresh_run_replays_equal_to_the_bit_weights_included(trained, iteration):
    report = replay_stored(str(trained), "r", iteration, "update")
    found = outcomes(report)
    for stage in ("manifest", "rewards", "alignment", "advantages", *(f"update {policy}" for policy in POLICIES)):
        assert found[stage] is Outcome.EQUAL, report.conclusion()
    for policy in POLICIES:  # two programs, the sampler and the trainer, never agree to the bit
        assert found[f"log-probs {policy}"] in (Outcome.CLOSE, Outcome.EQUAL)
    assert report.equal
    assert not report.notes
    assert all(verdict.compared for verdict in report.verdicts)


def test_the_fresh_run_has_what_a_replay_could_get_wrong(trained):
    steps = [json.loads((iteration_folder(trained, n) / "manifest.json").read_text())["policies"] for n in range(3)]
    assert any(one["sub"]["to_version"] > one["sub"]["from_version"] for one in steps)
    (compared,) = (
        v.compared for v in replay_stored(str(trained), "r", 0, "update").verdicts if v.stage == "update main"
    )
    assert compared > 80_000, "weights and both moments"


@pytest.mark.parametrize("plant", KINDS, ids=lambda plant: plant.__name__)
def test_damage_is_named_with_its_stage_and_trajectory(copy, plant):
    expected = plant(copy)
    report = replay_stored(str(copy), "r", ITERATION, "update")
    assert not report.equal
    assert report.first is not None
    assert report.first.stage == expected.stage, report.conclusion()
    for word in expected.words:
        assert word in report.first.words()
    assert not verify_run(require_run(open_store(str(copy)), "r")).sound


def test_another_code_version_is_a_note_and_not_a_difference(copy):
    with json_of(iteration_folder(copy, 2) / "manifest.json") as manifest:
        manifest["code_version"] = "0.0.1+0123456789ab"
    report = replay_stored(str(copy), "r", 2, "update")
    assert report.equal
    (note,) = report.notes
    assert "computed by 0.0.1+0123456789ab" in note


def test_a_reader_that_cannot_write_finds_the_same_and_leaves_every_file_as_it_was(trained, copy):
    def listing() -> dict[str, tuple[int, int, bytes]]:
        return {
            str(path.relative_to(copy)): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
            for path in sorted(copy.rglob("*"))
            if path.is_file()
        }

    folders = [path for path in (copy, *copy.rglob("*")) if path.is_dir()]
    for path in copy.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    copy.chmod(0o555)
    before, times = listing(), [path.stat().st_mtime_ns for path in folders]
    assert outcomes(replay_stored(str(copy), "r", 1, "update")) == outcomes(
        replay_stored(str(trained), "r", 1, "update")
    )
    assert listing() == before
    assert [path.stat().st_mtime_ns for path in folders] == times, "no name came or went"
    for path in folders:
        path.chmod(0o755)


@pytest.fixture(scope="module")
def on_s3(trained, seaweedfs_endpoint) -> Iterator[str]:
    """The same run on a real S3 server, where an export brought it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", seaweedfs_endpoint)
        export_stored(str(trained), "r", "s3://store/replayed", iterations=[0, 1])
        yield "s3://store/replayed"


def test_a_run_on_object_storage_replays_the_same(on_s3):
    report = replay_stored(on_s3, "r", 1, "update")
    assert report.equal, report.conclusion()
    assert outcomes(report)["update main"] is Outcome.EQUAL


def test_other_settings_are_tried_on_object_storage_as_on_a_disk(on_s3, trained):
    there, here = (what_if_stored(store, "r", 1, ["alignment.d=2"], "advantages") for store in (on_s3, str(trained)))
    assert there == here


def test_an_exported_iteration_verifies_and_replays_elsewhere_weights_included(program, trained, tmp_path):
    archive, store = tmp_path / "one.tar.zst", tmp_path / "elsewhere"
    for command in (
        ("export", "r", archive, "--iteration", 1, "--store", trained),
        ("import", archive, "--store", store),
        ("verify", "r", "--store", store),
    ):
        ended = program.run(*command)
        assert ended.code == 0, ended.err
    assert "not included: iteration 0, so the link of iteration 1 to it was not checked" in ended.out

    replayed = program.run("replay", "r", 1, "--store", store, "--json")
    assert replayed.code == 0, replayed.err
    assert json.loads(replayed.out)["notes"] == ["iteration 0 is not in this export: the link to it was not checked."]
    again = program.run("import", archive, "--store", store)
    assert again.code == 2
    assert "the store has a run of that name" in again.err
    nothing = program.run("replay", "r", 0, "--store", store)
    assert nothing.code == 2
    assert "Committed: 1." in nothing.err


def test_an_export_without_policies_replays_through_advantages(trained, tmp_path):
    export_stored(str(trained), "r", str(tmp_path), iterations=[1], policies=False)
    assert replay_stored(str(tmp_path), "r", 1, "advantages").equal
    for asked in (
        lambda: replay_stored(str(tmp_path), "r", 1, "update"),
        lambda: what_if_stored(str(tmp_path), "r", 1, ["alignment.d=2"], "update"),
    ):
        with pytest.raises(ConfigError, match="Give --through advantages"):
            asked()


def test_through_advantages_needs_no_model_and_no_torch(copy):
    shutil.rmtree(copy / "r/policies")
    code = (
        "import sys\nfrom flows.cli import app\n"
        f"app(['replay', 'r', '0', '--store', {str(copy)!r}, '--through', 'advantages'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'prefect'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "advantages" in done.stdout

    report = replay_stored(str(copy), "r", 0, "update")
    assert report.first is not None
    assert report.first.stage == "log-probs main"
    assert report.first.outcome is Outcome.UNREADABLE


def test_the_exit_code_says_the_verdict(program, copy):
    whole = program.run("replay", "r", 1, "--store", copy, "--json")
    assert whole.code == 0, whole.err
    assert json.loads(whole.out)["equal"] is True

    KINDS[2](copy)
    damaged = program.run("replay", "r", 1, "--store", copy, "--through", "advantages")
    assert damaged.code == 1
    assert "rewards differs" in damaged.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("r", 7), "Committed: 0 to 2"), (("nobody", 0), "Runs there: r")],
    ids=["iteration", "run"],
)
def test_what_is_not_there_is_bad_input(program, trained, arguments, words):
    ended = program.run("replay", *arguments, "--store", trained)
    assert ended.code == 2
    assert words in ended.err


async def test_the_flow_keeps_the_verdict_as_an_artifact_and_fails_where_something_differs(
    prefect_server, trained, copy
):
    found = await replay("r", 1, str(trained), "advantages")
    assert found["equal"]

    KINDS[2](copy)
    state = await replay("r", 1, str(copy), "advantages", return_state=True)
    assert state.is_failed()
    assert "rewards differs" in state.message

    from prefect.client.orchestration import get_client

    async with get_client() as client:
        kept = [one for one in await client.read_artifacts() if one.key == "mgrpo-replay"]
    assert any("equal bit for bit" in one.data for one in kept)
    assert any("column reward" in one.data for one in kept)


def test_what_a_users_own_graders_said_is_kept_and_named(program, team, tmp_path):
    """An import path may lead to a model: it is not asked again, and the verdict says so."""
    store = tmp_path / "graded"
    ended = program.run(
        *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", 1),
        *("--set", "agents.main.verifier=mgrpo_core.rewards.verifiers:exact_match"),
        *("--set", "agents.searcher.judge=mgrpo_core.rewards.rule_judge:SupportJudge"),
        *("--set", "agents.searcher.reward={format: 0.3, main_correct: 0.4, expert: 0.3}"),
    )
    assert ended.code == 0, ended.err
    report = replay_stored(str(store), "r", 0, "advantages")
    assert report.equal, report.conclusion()
    (rewards,) = (verdict for verdict in report.verdicts if verdict.stage == "rewards")
    assert rewards.kept == (
        "correct (mgrpo_core.rewards.verifiers:exact_match)",
        "expert of searcher (mgrpo_core.rewards.rule_judge:SupportJudge)",
    )
    assert "kept as stored: correct" in report.conclusion()

    with rows_of(iteration_folder(store) / "rewards.parquet") as rows:
        rows[0]["reward"] += 0.5
    damaged = replay_stored(str(store), "r", 0, "advantages")
    assert damaged.first is not None
    assert damaged.first.stage == "rewards"


async def test_the_flow_tries_other_settings_too(prefect_server, trained):
    found = await replay("r", 1, str(trained), "advantages", ["alignment.d=[1,2]"])
    assert [tried["changes"] for tried in found["tried"]] == [("alignment.d=1",), ("alignment.d=2",)]


def test_other_settings_are_tried_on_the_command_line(program, trained, tmp_path):
    picture = tmp_path / "what-if.png"
    ended = program.run(
        *("replay", "r", 1, "--store", trained, "--through", "advantages", "--picture", picture, "--json"),
        *("--set", "advantage.normalization=center", "--grid", "alignment.d=1,2"),
    )
    assert ended.code == 0, ended.err
    assert [tried["changes"] for tried in json.loads(ended.out)["tried"]] == [
        ["advantage.normalization=center", "alignment.d=1"],
        ["advantage.normalization=center", "alignment.d=2"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")

    refused = program.run("replay", "r", 1, "--store", trained, "--set", "seed=4")
    assert refused.code == 2
    assert "cannot be tried" in refused.err
