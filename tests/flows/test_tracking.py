"""MLflow sees a training run as one run, whatever became of its processes (cases G2, G3, G4)."""

import signal
import time
from pathlib import Path

import pytest

from tests.flows.program import Program, Trap
from tests.flows.stored import metrics_of

# MLflow 3.17 on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="session")
def story(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """A store, and after each start of its run: the exit code, and the status in MLflow.

    One iteration; an update that raises; SIGTERM in a rollout; SIGKILL; and then the rest, three iterations in all.
    """
    store = tmp_path_factory.mktemp("tracked")
    base = ("train", team / "run.yaml", "--run", "r", "--store", store, "--set", "tracking.mlflow=true")
    story: list[tuple[int, str]] = []

    def ended(code: int) -> None:
        (run,) = _client(store).search_runs(_experiments(store))
        story.append((code, run.info.status))

    ended(program.run(*base).code)
    ended(
        program.run(
            *base, "--iterations", 3, traps=[Trap("infra.training.policy_update:train_policy", action="raise")]
        ).code
    )
    hangs = store / "hangs"
    trap = Trap("mgrpo_core.rollout.controller:within", call=5, action="hang", file=str(hangs))
    running = program.start(*base, "--iterations", 3, traps=[trap])
    while not hangs.exists():
        time.sleep(0.05)
    time.sleep(1)  # the run is opened in the background
    running.signal(signal.SIGTERM)
    ended(running.wait(60).code)
    ended(program.run(*base, "--iterations", 3, traps=[Trap("flows.compute_iteration:report_iteration", "exit")]).code)
    ended(program.run(*base, "--iterations", 3, "--set", "rollout.concurrency=7").code)
    return store, story


def _client(store: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{store / 'mlflow.db'}")


def _experiments(store: Path) -> list[str]:
    return [one.experiment_id for one in _client(store).search_experiments()]


# case G4
def test_the_status_is_the_fate_of_the_process_and_a_killed_one_s_run_is_taken_up_again(story):
    _, ends = story
    assert ends == [(0, "FINISHED"), (1, "FAILED"), (143, "KILLED"), (-9, "RUNNING"), (0, "FINISHED")]


def test_all_starts_are_one_run_and_each_iteration_is_logged_once(story):
    store, _ = story
    client = _client(store)
    (run,) = client.search_runs(_experiments(store))
    assert [one.step for one in client.get_metric_history(run.info.run_id, "iteration")] == [0, 1, 2]
    for name in run.data.metrics:
        steps = [one.step for one in client.get_metric_history(run.info.run_id, name)]
        assert len(steps) == len(set(steps)), f"{name} was logged twice"
    for iteration in range(3):
        expected = metrics_of(store, iteration)["main/reward"]
        logged = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "main/reward")}
        assert logged[iteration] == pytest.approx(expected)


# cases G2, G3
def test_the_whole_config_is_an_artifact_and_a_changed_setting_is_told_beside_the_first(story):
    store, _ = story
    client = _client(store)
    (run,) = client.search_runs(_experiments(store))
    configs = client.list_artifacts(run.info.run_id, "configs")
    assert len(configs) == 3, "one iteration, three, and another concurrency"
    assert run.data.params["rollout.concurrency"] == "256"
    assert run.data.tags["changed.rollout.concurrency"] == "7"
