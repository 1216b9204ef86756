"""A training run as one MLflow run, found again by its identity, written by a thread that training never waits for.

Measured: 50 metrics take 28 ms on SQLite and 36–145 ms on a server; importing mlflow takes 3 s and the first use of a
SQLite file 5 s more. All of it happens beside the rollouts, in order, so a synchronous client is enough.
"""

import hashlib
import json
import logging
import os
import sqlite3
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from infra.tracking.background import Background
from infra.tracking.legal_names import legal_name
from infra.tracking.parameters import canonical_json, flat_parameters
from infra.tracking.tracker import IterationRecord, Outcome, RunIdentity

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_log = logging.getLogger("mgrpo.tracking")

IDENTITY_TAG = "mgrpo.identity"
ITERATION_METRIC = "iteration"
NONFINITE_METRIC = "nonfinite"
_CHANGED = "changed."  # tag: the value a parameter has now, where it is not the one it was first logged with
_PER_BATCH = 100
_LONGEST_TAG = 5000


def local_uri(store: str, otherwise: Path) -> str:
    """Where MLflow's data goes by default: a SQLite file in a local store, in `otherwise` where the store is remote."""
    folder = otherwise if "://" in store else Path(store)
    return f"sqlite:///{folder.resolve() / 'mlflow.db'}"


class MlflowTracker:
    """A `Tracker` on an MLflow tracking store.

    Parameters are written once and spelt canonically; a value that really changed before a resume is kept as a tag
    `changed.<parameter>` and warned about, with the new config beside the old among the artifacts.

    Args:
        uri: tracking URI: `sqlite:///…/mlflow.db` (made if missing, artifacts beside it) or a server's `http(s)://…`.
        experiment: name of the MLflow experiment; made if missing.
        flush_s: longest wait of `finish` for what is still on its way.
    """

    def __init__(self, uri: str, experiment: str, *, flush_s: float = 30.0) -> None:
        self._uri = uri
        self._experiment = experiment
        self._flush_s = flush_s
        self._background = Background("MLflow")
        self._client: MlflowClient | None = None
        self._start: tuple[RunIdentity, Mapping[str, object]] | None = None
        self._run_id: str | None = None
        self._run_page: str | None = None
        self._unsent: list[IterationRecord] = []
        self._newest = -1
        self._stored: tuple[int, set[str]] = (-1, set())  # what the store is known to have of one iteration
        self._in_doubt = False  # a send broke off: the store may have what was not acknowledged

    @property
    def troubles(self) -> int:
        return self._background.troubles

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has answered."""
        return self._run_id

    @property
    def link(self) -> str | None:
        if self._run_page is None or not self._uri.startswith("http"):
            return None
        return f"{self._uri.rstrip('/')}/#{self._run_page}"

    def start(self, identity: RunIdentity, config: Mapping[str, object]) -> None:
        self._start = (identity, config)
        self._run_id = None
        self._background.submit("opening the run", self._open)

    def log_iteration(self, record: IterationRecord) -> None:
        def send() -> None:
            self._unsent.append(record)
            self._send()

        self._background.submit(f"logging iteration {record.iteration}", send)

    def log_picture(self, name: str, png: bytes) -> None:
        def send() -> None:
            client, run_id = self._opened()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / name
                path.write_bytes(png)
                client.log_artifact(run_id, str(path))

        self._background.submit(f"storing {name}", send)

    def finish(self, outcome: Outcome) -> None:
        def close() -> None:
            client, run_id = self._opened()
            self._send()
            client.set_terminated(run_id, outcome.value)

        self._background.submit("closing the run", close)
        self._background.wait(self._flush_s)

    # What follows runs in the background thread only.

    def _opened(self) -> "tuple[MlflowClient, str]":
        """The client and the open run; opens it now where the store did not answer before."""
        if self._run_id is None:
            self._open()
        assert self._client is not None
        assert self._run_id is not None
        return self._client, self._run_id

    def _open(self) -> None:
        if self._start is None:
            raise RuntimeError("start(identity, config) was never called")
        identity, config = self._start
        client = self._client = self._client or _client(self._uri)
        digest = hashlib.sha256(json.dumps([identity.run, identity.store]).encode()).hexdigest()
        experiment_id = self._experiment_id(client)
        found = client.search_runs(
            [experiment_id],
            filter_string=f"tags.`{IDENTITY_TAG}` = '{digest}'",
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        if found:
            run = found[0]
            if run.info.status == "RUNNING":
                client.set_tag(run.info.run_id, "mgrpo.orphaned", "a process died without closing the run")
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            tags = {IDENTITY_TAG: digest, "mgrpo.run": identity.run, "mgrpo.store": identity.store}
            run = client.create_run(
                experiment_id, tags={name: text[:_LONGEST_TAG] for name, text in tags.items()}, run_name=identity.run
            )
        run_id = run.info.run_id
        client.set_tag(run_id, "mgrpo.starts", str(int(run.data.tags.get("mgrpo.starts", "0")) + 1))
        history = client.get_metric_history(run_id, ITERATION_METRIC)
        self._newest = max((metric.step for metric in history), default=-1)
        self._log_config(client, run, config)
        self._run_page = f"/experiments/{experiment_id}/runs/{run_id}"
        self._run_id = run_id

    def _experiment_id(self, client: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return experiment.experiment_id
        try:
            # By default artifacts would go to the working directory of whoever came first.
            beside = _sqlite_file(self._uri)
            location = str(beside.parent / ".mlflow-artifacts") if beside else None
            return client.create_experiment(self._experiment, artifact_location=location)
        except MlflowException:
            # Another run of the same moment made it.
            experiment = client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return experiment.experiment_id

    def _log_config(self, client: "MlflowClient", run: "Run", config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        run_id, tags = run.info.run_id, run.data.tags
        text = canonical_json(config)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        wanted = {legal_name(name): value for name, value in flat_parameters(config).items()}
        logged = dict(run.data.params)
        new = [Param(name, value) for name, value in wanted.items() if name not in logged]
        for begin in range(0, len(new), _PER_BATCH):
            client.log_batch(run_id, params=new[begin : begin + _PER_BATCH])
        for name, value in wanted.items():
            before = tags.get(_tag(_CHANGED + name), logged.get(name, value))
            if before != value:
                _log.warning("MLflow run %s: %s is %s since this start, %s before.", run_id, name, value, before)
                client.set_tag(run_id, _tag(_CHANGED + name), value)
        if tags.get("mgrpo.config_sha256") != digest:
            client.log_text(run_id, text, f"configs/{digest}.json")
            client.set_tag(run_id, "mgrpo.config_sha256", digest)

    def _send(self) -> None:
        """Send every record not stored yet, oldest first; what fails stays for the next time."""
        client, run_id = self._opened()
        while self._unsent:
            doubted, self._in_doubt = self._in_doubt, True
            self._send_one(client, run_id, self._unsent[0], doubted=doubted)
            self._in_doubt = False
            self._unsent.pop(0)

    def _send_one(self, client: "MlflowClient", run_id: str, record: IterationRecord, *, doubted: bool) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        step, lost = record.iteration, record.nonfinite()
        values = {legal_name(name): value for name, value in record.finite().items()}
        values[NONFINITE_METRIC] = float(len(lost))
        values[ITERATION_METRIC] = float(step)
        if self._stored[0] != step:
            self._stored = (step, set())
        stored = self._stored[1]
        if doubted or (step <= self._newest and not stored):
            stored |= self._stored_at(client, run_id, step, values)
        now = get_current_time_millis()
        fresh = [Metric(name, value, now, step) for name, value in values.items() if name not in stored]
        if record.manifest_json and fresh:
            client.log_text(run_id, record.manifest_json, f"manifests/{step:08d}.json")
        for name, version in record.policy_versions.items():
            client.set_tag(run_id, _tag(f"policy.{name}"), str(version))
        if lost:
            client.set_tag(run_id, _tag(f"nonfinite.{step}"), json.dumps(lost)[:_LONGEST_TAG])
        # The metric `iteration` goes last: where it stands, the iteration is told.
        for begin in range(0, len(fresh), _PER_BATCH):
            batch = fresh[begin : begin + _PER_BATCH]
            client.log_batch(run_id, metrics=batch)
            stored.update(metric.key for metric in batch)
        self._newest = max(self._newest, step)

    def _stored_at(self, client: "MlflowClient", run_id: str, step: int, values: Mapping[str, float]) -> set[str]:
        """Which of these metrics the store has at this step; a value that differs is kept as it was, and told."""
        stored, differing = set[str](), list[str]()
        for name, value in values.items():
            at_step = [metric.value for metric in client.get_metric_history(run_id, name) if metric.step == step]
            if at_step:
                stored.add(name)
                if value != at_step[0]:
                    differing.append(name)
        if differing:
            client.set_tag(run_id, _tag(f"differs.{step}"), json.dumps(differing)[:_LONGEST_TAG])
            _log.warning(
                "MLflow run %s: iteration %d was told before with other values of %s; the first ones stay.",
                run_id,
                step,
                ", ".join(differing[:5]) + (" …" if len(differing) > 5 else ""),
            )
        return stored


def _client(uri: str) -> "MlflowClient":
    # A server that does not answer would hold a record for minutes: 7 retries of 120 s are MLflow's default.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # A training run tells nobody else that it runs, unless its user says so.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    file = _sqlite_file(uri)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        # MLflow tries ten times, 100 s in all, to open a file that cannot be opened; ask SQLite once instead.
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA schema_version")
    # The first use of a SQLite file logs some fifty lines of migrations.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # MLflow 3.17 on SQLAlchemy 2.1; nothing a user could do about it.
    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _sqlite_file(uri: str) -> Path | None:
    return Path(urlsplit(uri).path[1:]) if uri.startswith("sqlite:") else None


def _tag(name: str) -> str:
    return legal_name(name)
