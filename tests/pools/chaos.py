"""Kills at random moments over everything that an iteration stands on, and what is left when it is calm again.

    python -m tests.pools.chaos --kills 100 --seed 0

starts services of its own, keeps a run's iterations going, and kills a worker, a flow run's process, both at once, the
Prefect server, its database, or S3, again and again. At the end: nothing lost, nothing doubled, nothing left Running.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectException

from flows.deployments.dead_runs import SUBMIT_S
from infra.deploy.local.services import Services, local_services
from infra.deploy.local.settings import LocalSettings, Ports
from infra.store.manifests import newest_committed, read_manifest
from infra.store.policies import require_version
from infra.store.runs import require_run
from infra.store.schemas import QUERIES, TRAJECTORIES
from infra.store.tables import read_table
from infra.store.verify import verify_run
from tests.pools.cluster import POOLS, Cluster, deployed

AWAY = (httpx.HTTPError, PrefectException, RuntimeError, OSError, TimeoutError)
"""What the server is to the one who watches, while it restarts."""
MOST_BETWEEN_S = 15.0
"""Between a service's return and the next kill: from 0 to so much."""
PATIENCE_S = 300.0
"""With one run, before the next is started."""
CALM_S = SUBMIT_S + 90
"""The automation's time, and a look of the server's own loops."""


@dataclass(slots=True)
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    after: dict[str, Counter[str]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def note(self, victim: str, end: str, words: str) -> None:
        self.ends[end] += 1
        self.after.setdefault(victim, Counter())[end] += 1
        if end != "Completed":
            self.words.setdefault(f"{victim}: {end}", words[:300])

    def table(self) -> str:
        """Rows: who was killed last in a run, columns: how the run ended."""
        ends = sorted(self.ends)
        lines = [f"| killed last | kills in all | {' | '.join(ends)} |", "|---|---:" + "|---:" * len(ends) + "|"]
        for victim in sorted(self.after):
            cells = [str(self.after[victim][end]) for end in ends]
            lines.append(f"| {victim} | {self.kills[victim]} | {' | '.join(cells)} |")
        return "\n".join(lines)


class Chaos:
    """Iterations under fire."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._services = cluster.services
        self._rng = rng
        self.tally = Tally()
        self._begun: dict[UUID, float] = {}
        self.victims: dict[str, Callable[[], None]] = {
            "worker of the iteration": lambda: self._program("worker-mgrpo-cpu"),
            "worker of an update": lambda: self._program(f"worker-mgrpo-gpu-{rng.choice(('main', 'sub'))}"),
            "process of a run": self._engine,
            "worker and its runs": self._worker_and_engines,
            "server": lambda: self._program("server"),
            "database": lambda: self._program("postgres"),
            "S3": lambda: self._program("s3"),
        }

    def run(self, kills: int, told: Callable[[str], None]) -> None:
        """Kills in a random order at random moments, while one iteration after another is started."""
        names = list(self.victims)
        order = [names[i % len(names)] for i in range(kills)]
        self._rng.shuffle(order)
        run, hits = self._started(), ["nothing"]
        for number, victim in enumerate(order):
            kill_at = time.monotonic() + self._rng.uniform(0.0, MOST_BETWEEN_S)
            while time.monotonic() < kill_at:
                if self._is_over(run):
                    self._note(run, hits)
                    run, hits = self._started(), ["nothing"]
                time.sleep(0.5)
            self.victims[victim]()
            self.tally.kills[victim] += 1
            hits.append(victim)
            told(f"{number + 1}/{kills} {victim}")
        self._cluster.until(lambda: self._is_over(run), 600, lambda: f"run {run} does not end")
        self._note(run, hits)

    def calm(self) -> None:
        """One iteration that nobody disturbs."""
        deadline = time.monotonic() + 600
        while True:
            end, words = self._end(self._started())
            if end == "Completed":
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"no iteration completes although nothing is killed any more: {end} {words}")
            time.sleep(5)

    def left_running(self) -> list[str]:
        """Runs that are not final although the automation has had its time."""
        states = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
        unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=states)))
        deadline = time.monotonic() + CALM_S
        while True:
            left = self._patiently(
                lambda: self._cluster.ask(lambda client: client.read_flow_runs(flow_run_filter=unfinished))
            )
            if not left or time.monotonic() > deadline:
                return [f"{one.name} {one.state_name}" for one in left]
            time.sleep(3)

    def _started(self) -> UUID:
        run = self._patiently(lambda: self._cluster.start())
        self._begun[run] = time.monotonic()
        return run

    def _is_over(self, run: UUID) -> bool:
        """Final; or so late that a schedule would have started the next one, whose part it is to take it over."""
        if time.monotonic() - self._begun[run] > PATIENCE_S:
            return True
        with contextlib.suppress(*AWAY):
            return self._cluster.state(run).is_final()
        return False

    def _end(self, run: UUID) -> tuple[str, str]:
        self._cluster.until(lambda: self._is_over(run), 600, lambda: f"run {run} does not end")
        state = self._patiently(lambda: self._cluster.state(run))
        return (state.name if state.is_final() else "left to the next") or "", state.message or ""

    def _note(self, run: UUID, hits: list[str]) -> None:
        self.tally.note(hits[-1], *self._end(run))

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 180
        while True:
            try:
                return ask()
            except AWAY:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def _program(self, name: str) -> None:
        before = self._services.pid(name)
        if before is not None:
            self._services.kill(name, signal.SIGKILL)
            self._services.wait_for(name, other_than=before)

    def _engine(self) -> None:
        engines = list(flow_run_processes(self._services.environment["PREFECT_API_URL"]))
        if engines:
            self._rng.choice(engines).kill()

    def _worker_and_engines(self) -> None:
        """Nobody is left to tell of their end but the server's automation."""
        below = {name: self._below(name) for name in (f"worker-{pool}" for pool in POOLS)}
        busy = [name for name, processes in below.items() if any(is_flow_run(one) for one in processes)]
        name = self._rng.choice(busy or sorted(below))
        worker = self._services.pid(name)
        if worker is None:
            return
        os.kill(worker, signal.SIGKILL)
        for process in below[name]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._services.wait_for(name, other_than=worker)

    def _below(self, name: str) -> list[psutil.Process]:
        pid = self._services.pid(name)
        try:
            return psutil.Process(pid).children(recursive=True) if pid else []
        except psutil.NoSuchProcess:
            return []


def is_flow_run(process: psutil.Process, api: str | None = None) -> bool:
    """Whether it computes a flow run; with `api`, one of that server."""
    try:
        environment = process.environ()
        mine = api is None or environment.get("PREFECT_API_URL") == api
        return mine and "PREFECT__FLOW_RUN_ID" in environment and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def flow_run_processes(api: str | None = None) -> Iterator[psutil.Process]:
    """Processes of flow runs on this machine; with `api`, of that server's."""
    return (process for process in psutil.process_iter() if is_flow_run(process, api))


def faults(cluster: Cluster) -> list[str]:
    """What is lost or doubled in the store; empty when all is well."""
    files = cluster.files()
    found = [str(fault) for fault in verify_run(require_run(files, cluster.run)).faults]
    newest = newest_committed(files, cluster.run)
    version = {"main": 0, "sub": 0}
    steps = {"main": 0, "sub": 0}
    for number in range(newest + 1):
        manifest = read_manifest(files, cluster.run, number).manifest
        folder = f"{cluster.run}/iterations/{number:08d}"
        queries = read_table(files, f"{folder}/queries.parquet", QUERIES, ["query_id"]).num_rows
        shards = [ref.path for name, ref in manifest.files.items() if name.startswith("trajectories/main-")]
        main = read_table(files, shards, TRAJECTORIES, ["trajectory_id", "query_id", "rollout_index"]).to_pylist()
        places = {(row["query_id"], row["rollout_index"]) for row in main}
        if len(main) != len(places) or len(places) != queries * 4:
            found.append(f"iteration {number}: {len(main)} main trajectories for {queries} queries x 4")
        for policy, step in manifest.policies.items():
            if step.from_version != version[policy] or step.to_version - step.from_version not in (0, 1):
                found.append(f"iteration {number}: {policy} {step.from_version} -> {step.to_version}")
            version[policy] = step.to_version
            figures = json.loads(files.read(f"{folder}/updates/{policy}.json"))["figures"]
            steps[policy] += figures["optimizer_steps"]
    for policy, number in version.items():
        record = require_version(files, cluster.run, policy, policy, number)
        there = _steps_taken(cluster, record.files)
        if there != steps[policy]:
            found.append(f"{policy}: its moments are of {there} optimiser steps, the iterations made {steps[policy]}")
    return found


def _steps_taken(cluster: Cluster, files: dict[str, Any]) -> int:
    ref = files.get("trainer_state.json")
    return json.loads(cluster.files().read(ref.path))["optimizer_steps"] if ref else 0


@contextlib.contextmanager
def stage(settings: dict[str, Any]) -> Iterator[Cluster]:
    """Services and a run of their own."""
    home = Path(tempfile.mkdtemp(prefix="mgrpo-chaos-"))
    home.chmod(0o755)  # PostgreSQL may run as another user
    try:
        local = LocalSettings(services=("server", "s3"), pools=POOLS, ports=Ports(0, 0, 0, 0))
        with local_services(home / "up", local) as services:
            yield _entered(services, home, settings)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _entered(services: Services, home: Path, settings: dict[str, Any]) -> Cluster:
    os.environ.update({name: value for name, value in services.environment.items() if name.startswith("AWS_")})
    folder = home / "team"
    folder.mkdir()
    return deployed(services, folder, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    with stage({"update_attempts": 4, "update_deadline_s": 60}) as cluster:
        chaos = Chaos(cluster, random.Random(asked.seed))
        chaos.run(asked.kills, lambda line: print(line, flush=True))
        chaos.calm()
        left = chaos.left_running()
        print(chaos.tally.table())
        for what, words in sorted(chaos.tally.words.items()):
            print(f"{what}: {words}")
        wrong = faults(cluster)
        iterations = newest_committed(cluster.files(), cluster.run) + 1
        print(
            f"{iterations} iterations committed in {time.monotonic() - began:.0f} s; faults: {wrong or 'none'}; "
            f"left running: {left or 'none'}"
        )
        if wrong or left:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
