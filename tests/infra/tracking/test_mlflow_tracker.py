import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from infra.tracking.legal_names import legal_name
from infra.tracking.mlflow_tracker import MlflowTracker, local_uri
from infra.tracking.tracker import IterationRecord, Outcome, RunIdentity, Tracker

ROOT = Path(__file__).parents[3]


def started(store: Path, config: Mapping[str, object] | None = None, run: str = "paper") -> MlflowTracker:
    tracker = MlflowTracker(local_uri(str(store), store), "mgrpo")
    tracker.start(RunIdentity(run, str(store)), config or {})
    return tracker


def runs_of(store: Path) -> list[Run]:
    client = MlflowClient(local_uri(str(store), store))
    experiment = client.get_experiment_by_name("mgrpo")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def history(store: Path, metric: str) -> list[tuple[int, float]]:
    (run,) = runs_of(store)
    client = MlflowClient(local_uri(str(store), store))
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, metric)]


def artifact(store: Path, path: str, target: Path) -> str:
    (run,) = runs_of(store)
    client = MlflowClient(local_uri(str(store), store))
    return Path(client.download_artifacts(run.info.run_id, path, str(target))).read_text(encoding="utf-8")


def test_is_a_tracker(store: Path) -> None:
    assert isinstance(MlflowTracker(local_uri(str(store), store), "mgrpo"), Tracker)


def test_a_resumed_run_is_the_same_run_and_tells_no_iteration_twice(store: Path) -> None:
    # cases F2 and G4
    first = started(store)
    first.log_iteration(IterationRecord(0, {"success": 0.1}))
    first.log_iteration(IterationRecord(1, {"success": 0.2}))
    first.log_iteration(IterationRecord(1, {"success": 0.2}))
    first.finish(Outcome.FAILED)
    second = started(store)
    second.log_iteration(IterationRecord(1, {"success": 0.2, "held_out": 0.5}))
    second.log_iteration(IterationRecord(2, {"success": 0.3}))
    second.finish(Outcome.FINISHED)
    assert history(store, "success") == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert history(store, "held_out") == [(1, 0.5)]
    (run,) = runs_of(store)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "paper")
    assert run.data.tags["mgrpo.starts"] == "2"
    assert first.troubles == second.troubles == 0


def test_runs_of_one_name_in_two_stores_are_two_runs(store: Path) -> None:
    uri = local_uri(str(store), store)
    for where in ("s3://one/runs", "s3://two/runs"):
        tracker = MlflowTracker(uri, "mgrpo")
        tracker.start(RunIdentity("paper", where), {})
        tracker.finish(Outcome.FINISHED)
    assert len(runs_of(store)) == 2


def test_no_name_is_refused_and_no_two_become_one(store: Path) -> None:
    # case G1
    names = ["good", "reward/mean@4", "timing(s)/gen", "adv[main]", "loss,total", "kl%", "sub=search", "a//b", "../x"]
    names += ["x" * 251, "x" * 250 + "y", "agent:sub", "é", "a b", "/a", "a/", "", ".", "a@b", "a_b", "..a/./b"]
    tracker = started(store)
    tracker.log_iteration(IterationRecord(0, {name: float(i) for i, name in enumerate(names)}))
    tracker.finish(Outcome.FINISHED)
    assert tracker.troubles == 0
    stored = runs_of(store)[0].data.metrics
    assert [stored[legal_name(name)] for name in names] == [float(i) for i in range(len(names))]


def test_more_metrics_and_parameters_than_a_batch_takes_are_all_stored(store: Path) -> None:
    tracker = started(store, {f"p{i}": i for i in range(230)})
    tracker.log_iteration(IterationRecord(0, {f"m{i}": float(i) for i in range(1100)}))
    tracker.finish(Outcome.FINISHED)
    data = runs_of(store)[0].data
    assert tracker.troubles == 0
    assert data.params["p229"] == "229"
    assert data.metrics["m1099"] == 1099.0


def test_a_config_of_any_length_is_kept_whole_with_its_hash(store: Path, tmp_path: Path) -> None:
    # case G2: two texts of 6,001 characters that differ at the end only
    configs = [{"prompt": "x" * 6000 + end} for end in "ab"]
    values, hashes = [], []
    for i, config in enumerate(configs):
        tracker = started(store, config, run=f"r{i}")
        tracker.finish(Outcome.FINISHED)
        assert tracker.troubles == 0
    for run in runs_of(store):
        values.append(run.data.params["prompt"])
        hashes.append(run.data.tags["mgrpo.config_sha256"])
        client = MlflowClient(local_uri(str(store), store))
        text = Path(client.download_artifacts(run.info.run_id, f"configs/{hashes[-1]}.json", str(tmp_path))).read_text()
        assert len(json.loads(text)["prompt"]) == 6001
        assert hashlib.sha256(text.encode()).hexdigest() == hashes[-1]
    assert len(set(values)) == len(set(hashes)) == 2


def test_another_spelling_of_the_same_config_is_no_change(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    # case G3
    started(store, {"lr": 1e-06, "t": (1, 2)}).finish(Outcome.FINISHED)
    again = started(store, {"t": [1, 2], "lr": 0.000001})
    again.finish(Outcome.FINISHED)
    assert again.troubles == 0
    assert not caplog.records
    assert not [tag for tag in runs_of(store)[0].data.tags if tag.startswith("changed.")]


def test_a_real_change_on_resume_is_shown_once_and_recorded(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # case G3: beta 0.04 -> 0.05
    started(store, {"loss": {"beta": 0.04}}).finish(Outcome.FINISHED)
    for _ in range(2):
        again = started(store, {"loss": {"beta": 0.05}})
        again.finish(Outcome.FINISHED)
        assert again.troubles == 0
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "loss.beta is 0.05 since this start, 0.04 before."
    ]
    data = runs_of(store)[0].data
    assert data.params["loss.beta"] == "0.04"
    assert data.tags["changed.loss.beta"] == "0.05"
    assert "0.05" in artifact(store, f"configs/{data.tags['mgrpo.config_sha256']}.json", tmp_path)


def test_what_is_not_finite_is_counted_and_named_never_stored(store: Path) -> None:
    # case G6
    nan, inf = float("nan"), float("inf")
    tracker = started(store)
    tracker.log_iteration(IterationRecord(3, {"loss": nan, "kl": inf, "grad": -inf, "fine": 1.0}))
    tracker.log_iteration(IterationRecord(4, {"loss": 0.5}))
    tracker.finish(Outcome.FINISHED)
    assert history(store, "nonfinite") == [(3, 3.0), (4, 0.0)]
    assert history(store, "loss") == [(4, 0.5)]
    data = runs_of(store)[0].data
    assert json.loads(data.tags["nonfinite.3"]) == ["grad", "kl", "loss"]
    assert not {"kl", "grad"} & set(data.metrics)


def test_policy_versions_manifest_and_pictures_go_with_the_run(store: Path, tmp_path: Path) -> None:
    tracker = started(store)
    tracker.log_iteration(IterationRecord(12, {"a": 1.0}, {"main": 13, "sub": 13}, '{"rows": 128}'))
    tracker.log_picture("curves.png", b"\x89PNG")
    tracker.finish(Outcome.FINISHED)
    tags = runs_of(store)[0].data.tags
    assert (tags["policy.main"], tags["policy.sub"]) == ("13", "13")
    assert artifact(store, "manifests/00000012.json", tmp_path) == '{"rows": 128}'
    client = MlflowClient(local_uri(str(store), store))
    assert Path(client.download_artifacts(runs_of(store)[0].info.run_id, "curves.png", str(tmp_path))).read_bytes()


def test_other_values_for_an_iteration_told_before_leave_a_mark(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = started(store)
    first.log_iteration(IterationRecord(0, {"success": 0.1, "kl": 0.0}))
    first.finish(Outcome.KILLED)
    second = started(store)
    second.log_iteration(IterationRecord(0, {"success": 0.4, "kl": 0.0}))
    second.finish(Outcome.FINISHED)
    assert history(store, "success") == [(0, 0.1)]
    assert json.loads(runs_of(store)[0].data.tags["differs.0"]) == ["success"]
    assert "iteration 0 was told before with other values of success" in caplog.text


def test_a_store_that_cannot_be_used_costs_one_warning_and_no_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    tracker = started(blocked)
    with caplog.at_level(logging.WARNING, "mgrpo.tracking"):
        for i in range(3):
            tracker.log_iteration(IterationRecord(i, {"a": 1.0}))
        tracker.log_picture("curves.png", b"")
        tracker.finish(Outcome.FINISHED)
    assert tracker.troubles == 6  # start, three iterations, picture, finish
    assert [r.getMessage().split(" failed")[0] for r in caplog.records] == ["MLflow: opening the run"]


def test_what_could_not_be_stored_is_stored_when_the_store_is_back(store: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden.db"
    (store / "mlflow.db").rename(hidden)
    (store / "mlflow.db").mkdir()  # SQLite cannot open a folder
    tracker = started(store)
    tracker.log_iteration(IterationRecord(0, {"a": 1.0}))
    tracker.log_iteration(IterationRecord(1, {"a": 2.0}))
    assert tracker._background.wait(60)
    assert tracker.troubles >= 3
    (store / "mlflow.db").rmdir()
    hidden.rename(store / "mlflow.db")
    tracker.log_iteration(IterationRecord(2, {"a": 3.0}))
    tracker.finish(Outcome.FINISHED)
    assert history(store, "a") == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_an_answer_lost_on_the_way_back_stores_nothing_twice(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(store)
    tracker.log_iteration(IterationRecord(0, {"a": 1.0}))
    assert tracker._background.wait(60)
    log_batch = MlflowClient.log_batch

    def stored_but_not_acknowledged(self: MlflowClient, *args: object, **kwargs: object) -> None:
        log_batch(self, *args, **kwargs)  # type: ignore[arg-type]
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", stored_but_not_acknowledged)
        tracker.log_iteration(IterationRecord(1, {"a": 2.0}))
        assert tracker._background.wait(60)
    assert tracker.troubles == 1
    tracker.log_iteration(IterationRecord(2, {"a": 3.0}))
    tracker.finish(Outcome.FINISHED)
    assert history(store, "a") == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = MlflowTracker(f"http://127.0.0.1:{silent.getsockname()[1]}", "mgrpo", flush_s=1.0)
        begin = time.monotonic()
        tracker.start(RunIdentity("paper", "s3://bucket/runs"), {})
        tracker.log_iteration(IterationRecord(0, {"a": 1.0}))
        tracker.finish(Outcome.FINISHED)
        assert time.monotonic() - begin < 60  # MLflow itself waits 120 s for an answer, several times
    assert tracker.troubles >= 1
    assert tracker.run_id is None


_TRAINING = """
import sys, time
from pathlib import Path
from infra.tracking.mlflow_tracker import MlflowTracker, local_uri
from infra.tracking.run_status import tracked
from infra.tracking.tracker import IterationRecord, RunIdentity
store = sys.argv[1]
tracker = MlflowTracker(local_uri(store, Path(store)), "mgrpo")
with tracked(tracker, RunIdentity("paper", store), {"seed": 1}):
    tracker.log_iteration(IterationRecord(0, {"success": 0.5}))
    assert tracker._background.wait(60)
    print("training", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "KILLED"), (signal.SIGKILL, "RUNNING")])
def test_a_killed_process_leaves_a_status_that_the_next_start_takes_up(
    store: Path, number: signal.Signals, status: str
) -> None:
    # case G4
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINING, str(store)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    process.send_signal(number)
    process.communicate(timeout=50)  # it would sleep for 60 s
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    (left,) = runs_of(store)
    assert left.info.status == status
    assert (left.info.end_time is None) == (status == "RUNNING")
    again = started(store, {"seed": 1})
    again.log_iteration(IterationRecord(0, {"success": 0.5}))
    again.log_iteration(IterationRecord(1, {"success": 0.6}))
    again.finish(Outcome.FINISHED)
    (run,) = runs_of(store)
    assert (run.info.run_id, run.info.status) == (left.info.run_id, "FINISHED")
    assert ("mgrpo.orphaned" in run.data.tags) == (status == "RUNNING")
    assert history(store, "success") == [(0, 0.5), (1, 0.6)]
