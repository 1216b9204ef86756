"""`kill -9` at any stage of an iteration, then the same command: nothing is lost, nothing is made twice."""

import signal
from pathlib import Path

import pytest

from infra.store.runs import open_store, require_run
from infra.store.verify import verify_run
from tests.flows.program import Ended, Program, Trap
from tests.flows.stored import iteration_folder, manifest_of, metrics_of, rows_of, tables_sha256, weights_sha256

ROLLOUTS = [
    Trap("infra.resources:publish_version", "exit"),  # main's version 0 is stored, the sub-agent's is not
    Trap("tasks.open_iteration:open_iteration"),
    Trap("tasks.open_iteration:open_iteration", "exit"),
    Trap("flows.compute_iteration:sub_agent_invocation"),
    Trap("flows.compute_iteration:main_rollout"),
    Trap("tasks.roll_out:stage_group"),
    Trap("tasks.roll_out:stage_group", "exit"),  # one of two groups is staged
    Trap("tasks.roll_out:stage_group", "exit", call=2),
]
STAGED = [
    Trap("flows.compute_iteration:main_rollout", "exit"),
    Trap("flows.compute_iteration:materialize_trajectories"),
    Trap("flows.compute_iteration:materialize_trajectories", "exit"),
    Trap("flows.compute_iteration:score_rewards"),
    Trap("flows.compute_iteration:score_rewards", "exit"),
    Trap("flows.compute_iteration:align_trajectories", "exit"),
    Trap("flows.compute_iteration:compute_advantages", "exit"),
    Trap("infra.training.policy_update:train_policy"),
    Trap("infra.training.policy_update:train_policy", "exit"),  # stepped, in memory only
    Trap("infra.training.policy_update:publish_version", "exit"),  # one version made, its figures not written
    Trap("infra.training.policy_update:publish_version", "exit", call=2),
    Trap("tasks.update_policy:update_policy", "exit"),
    Trap("flows.compute_iteration:measure_iteration", "exit"),
    Trap("tasks.commit_iteration:commit_manifest"),
]
COMMITTED = [
    Trap("tasks.commit_iteration:commit_manifest", "exit"),  # staging is still there
    Trap("flows.compute_iteration:publish_policy"),
    Trap("flows.compute_iteration:report_iteration"),
    Trap("flows.compute_iteration:report_iteration", "exit"),
]


def _name(trap: Trap) -> str:
    return f"{trap.at.split(':')[1]}-{trap.on}-{trap.call}"


def _train(program: Program, team: Path, store: Path, *traps: Trap) -> Ended:
    # One rollout at a time: the last bit of a log-prob depends on what else is in the engine's batch, and every bit
    # shall be equal here.
    one = ("--set", "rollout.concurrency=1")
    return program.run("train", team / "run.yaml", "--run", "r", "--store", store, *one, traps=traps)


def _kill(program: Program, team: Path, store: Path, trap: Trap) -> None:
    ended = _train(program, team, store, trap)
    assert ended.code == -signal.SIGKILL, f"the trap was not met: {ended.err}"


def _continue(program: Program, team: Path, store: Path, *traps: Trap) -> None:
    ended = _train(program, team, store, *traps)
    assert ended.code == 0, ended.err
    assert verify_run(require_run(open_store(str(store)), "r")).sound
    assert not (iteration_folder(store) / "staging").exists()


@pytest.fixture(scope="session")
def undisturbed(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one iteration that nothing stopped."""
    store = tmp_path_factory.mktemp("undisturbed")
    ended = _train(program, team, store)
    assert ended.code == 0, ended.err
    assert len(rows_of(store, "trajectories/searcher-0000")) > 4, "the team must delegate, or this proves little"
    return store


@pytest.mark.parametrize("trap", ROLLOUTS, ids=_name)
def test_a_kill_before_everything_is_staged_keeps_what_is_staged_and_generates_the_rest(
    program, team, tmp_path, undisturbed, trap
):
    _kill(program, team, tmp_path, trap)
    staging = iteration_folder(tmp_path) / "staging"
    staged = {path.name: path.read_bytes() for path in staging.glob("0*.parquet")} if staging.exists() else {}
    made = tmp_path / "made"
    _continue(program, team, tmp_path, Trap("tasks.roll_out:stage_group", action="note", file=str(made)))

    assert len(made.read_text().splitlines() if made.exists() else []) == 2 - len(staged)
    assert tables_sha256(tmp_path) == tables_sha256(undisturbed)
    assert weights_sha256(tmp_path) == weights_sha256(undisturbed)
    assert manifest_of(tmp_path)["cursor"] == manifest_of(undisturbed)["cursor"]


@pytest.mark.parametrize("trap", STAGED, ids=_name)
def test_a_kill_after_everything_is_staged_leaves_no_trace(program, team, tmp_path, undisturbed, trap):
    _kill(program, team, tmp_path, trap)
    _continue(program, team, tmp_path, Trap("mgrpo_core.rollout.stages:Controller", action="raise"))

    assert tables_sha256(tmp_path) == tables_sha256(undisturbed)
    assert weights_sha256(tmp_path) == weights_sha256(undisturbed)
    assert metrics_of(tmp_path) == metrics_of(undisturbed)
    assert manifest_of(tmp_path)["policies"] == manifest_of(undisturbed)["policies"]


def test_a_version_that_was_published_before_the_kill_gets_no_second_optimiser_step(program, team, tmp_path):
    _kill(program, team, tmp_path, Trap("infra.training.policy_update:publish_version", "exit", call=2))
    records = sorted((tmp_path / "r/policies").glob("*/00000001/version.json"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in records]
    _continue(program, team, tmp_path, Trap("infra.training.policy_update:train_policy", action="raise"))

    assert len(before) == 2
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in records] == before


@pytest.mark.parametrize("trap", COMMITTED, ids=_name)
def test_a_kill_after_the_commit_leaves_an_iteration_that_is_never_made_again(
    program, team, tmp_path, undisturbed, trap
):
    _kill(program, team, tmp_path, trap)
    before = (iteration_folder(tmp_path) / "manifest.json").read_bytes()
    _continue(program, team, tmp_path, Trap("flows.compute_iteration:main_rollout", action="raise"))

    assert (iteration_folder(tmp_path) / "manifest.json").read_bytes() == before
    assert tables_sha256(tmp_path) == tables_sha256(undisturbed)
    assert weights_sha256(tmp_path) == weights_sha256(undisturbed)
