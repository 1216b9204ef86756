"""Iterations on a real Prefect deployment: work pools, PostgreSQL, S3."""

import time
from uuid import UUID

import psutil
import pytest
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.states import Cancelling, Scheduled

from infra.deploy.local.services import Services
from tests.pools.chaos import flow_run_processes
from tests.pools.cluster import Cluster

pytestmark = pytest.mark.timeout(900)


def test_three_iterations_are_committed_on_s3_each_update_by_its_own_pools_worker(cluster: Cluster) -> None:
    stepped: list[str] = []
    for number in range(3):
        run = cluster.start()
        assert cluster.finished(run).is_completed(), cluster.state(run)
        assert cluster.flow_run(run).name == f"{cluster.run}-{number:04d}"
        manifest = cluster.manifest(number)
        stepped += [name for name, step in manifest["policies"].items() if step["to_version"] > step["from_version"]]
        children = {child.name: child for child in cluster.children(run)}
        assert set(children) == {f"{cluster.run}-{number:04d}-{policy}" for policy in ("main", "sub")}
        for policy in ("main", "sub"):
            child = children[f"{cluster.run}-{number:04d}-{policy}"]
            assert child.work_pool_name == f"mgrpo-gpu-{policy}"
            assert child.name in cluster.log(f"worker-mgrpo-gpu-{policy}")
            logs = cluster.ask(
                lambda client, child=child: client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[child.id])))
            )
            assert any("version" in line.message and "->" in line.message for line in logs)
    assert cluster.mgrpo("verify", cluster.run).returncode == 0
    assert sorted(cluster.noted("updates")) == ["main"] * 3 + ["sub"] * 3
    assert len(stepped) >= 4, "the small team's groups differ in reward more often than not"


def test_deploying_again_changes_nothing(cluster: Cluster) -> None:
    cluster.mgrpo("deploy", "team.yaml", "--run", cluster.run)  # the stand-ins are replaced
    again = cluster.mgrpo("deploy", "team.yaml", "--run", cluster.run)
    assert again.returncode == 0, again.stderr
    done = [line.split()[-1] for line in again.stdout.splitlines() if line.startswith(("work", "depl", "auto"))]
    assert done == ["unchanged"] * 12


def test_a_failed_update_fails_the_iteration_with_its_words_and_link_and_the_next_start_resumes(
    cluster: Cluster,
) -> None:
    cluster.plan("fail").touch()
    run = cluster.start()
    state = cluster.finished(run)
    assert state.is_failed()
    assert "planted failure of policy" in (state.message or "")
    assert "/runs/flow-run/" in (state.message or "")
    # two attempts each; the one that gave up first took the other's wait with it, not its run
    assert 2 <= len(cluster.noted("starts")) <= 4
    assert not cluster.files().exists(f"{cluster.run}/iterations/00000000/manifest.json")
    cluster.plan("fail").unlink()
    assert cluster.finished(cluster.start()).is_completed()
    assert sorted(cluster.noted("updates")) == ["main", "sub"]


def test_an_update_whose_process_is_killed_is_done_by_the_next_attempt(cluster: Cluster) -> None:
    cluster.plan("kill").touch()
    run = cluster.start()
    cluster.until(lambda: len(cluster.noted("starts")) >= 2, 180)
    cluster.plan("kill").unlink()
    assert cluster.finished(run).is_completed()
    assert len(cluster.noted("starts")) == 4
    assert sorted(cluster.noted("updates")) == ["main", "sub"]


def test_an_iteration_killed_while_its_updates_run_leaves_them_to_the_next_start(cluster: Cluster) -> None:
    cluster.plan("hold").touch()
    run = cluster.start()
    cluster.until(lambda: len(cluster.noted("starts")) == 2, 60)
    _kill_flow_run(cluster, run)
    cluster.until(lambda: cluster.state(run).is_crashed(), 30)
    again = cluster.start()
    cluster.until(lambda: "Waiting for mgrpo-policy-update/main" in _messages(cluster, again), 60)
    cluster.plan("hold").unlink()
    assert cluster.finished(again).is_completed()
    assert len(cluster.noted("starts")) == 2
    assert sorted(cluster.noted("updates")) == ["main", "sub"]


def test_an_update_that_is_in_the_store_is_not_run_again(cluster: Cluster) -> None:
    cluster.plan("hold").touch()
    run = cluster.start()
    cluster.until(lambda: len(cluster.noted("starts")) == 2, 60)
    _kill_flow_run(cluster, run)
    cluster.until(lambda: cluster.state(run).is_crashed(), 30)
    cluster.plan("hold").unlink()
    cluster.until(lambda: sorted(cluster.noted("updates")) == ["main", "sub"], 30)
    for child in cluster.children(run):
        cluster.finished(child.id)
    again = cluster.start()
    assert cluster.finished(again).is_completed()
    assert cluster.children(again) == []
    assert "is in the store already" in _messages(cluster, again)


def test_cancelling_an_iteration_cancels_its_updates_and_frees_their_slots(cluster: Cluster) -> None:
    cluster.plan("hold").touch()
    run = cluster.start()
    cluster.until(lambda: len(cluster.noted("starts")) == 2, 60)
    pids = [int(line.split()[1]) for line in cluster.noted("starts")]
    children = [child.id for child in cluster.children(run)]
    cancelled = time.monotonic()
    _cancel(cluster, run)
    cluster.until(lambda: all(cluster.state(child).is_cancelled() for child in children), 40)
    took = time.monotonic() - cancelled
    print(f"children Cancelled {took:.1f} s after the command")
    assert cluster.finished(run).is_cancelled()
    assert not any(_alive(pid) for pid in pids)
    cluster.plan("hold").unlink()
    assert cluster.finished(cluster.start()).is_completed()


def test_cancelling_an_iteration_in_its_rollouts_leaves_no_process_and_what_is_staged(cluster: Cluster) -> None:
    # a few rollouts at a time: those of 64 queries shall take longer than a cancellation does
    few = ("--set", "rollout.concurrency=8")
    sizes = ("--set", "rollout.queries_per_iteration=64", *few, "--set", "tracking.mlflow=false")
    assert cluster.mgrpo("deploy", "quickstart", "--run", cluster.run + "-q", *sizes).returncode == 0
    run = cluster.start(run=cluster.run + "-q", config=None)
    staging = f"{cluster.run}-q/iterations/00000000/staging"
    cluster.until(lambda: any(name.endswith(".parquet") for name in cluster.files().names(staging)), 120)
    _cancel(cluster, run)
    assert cluster.finished(run, 40).is_cancelled()
    cluster.until(lambda: not _processes_of(run), 20)
    staged = [name for name in cluster.files().names(staging) if name.endswith(".parquet")]
    assert 0 < len(staged) < 64
    again = cluster.start(run=cluster.run + "-q", config=None)
    assert cluster.finished(again, 240).is_completed(), cluster.state(again)


def test_prefects_own_retry_repeats_no_rollout_and_no_update(cluster: Cluster) -> None:
    cluster.plan("fail").touch()
    run = cluster.start()
    assert cluster.finished(run).is_failed()
    cluster.plan("fail").unlink()
    cluster.ask(lambda client: client.set_flow_run_state(run, Scheduled(), force=True))
    cluster.until(lambda: cluster.flow_run(run).run_count == 2, 60)
    assert cluster.finished(run).is_completed(), cluster.state(run)
    assert sorted(cluster.noted("updates")) == ["main", "sub"]


def test_a_second_run_of_the_deployment_is_cancelled_while_one_is_at_work(cluster: Cluster) -> None:
    cluster.plan("hold").touch()
    first = cluster.start()
    cluster.until(lambda: len(cluster.noted("starts")) == 2, 60)
    second = cluster.start()
    assert cluster.finished(second).is_cancelled()
    cluster.plan("hold").unlink()
    assert cluster.finished(first).is_completed()


def test_an_update_that_no_worker_takes_fails_with_the_pools_name(services: Services, cluster: Cluster) -> None:
    services.stop("worker-mgrpo-gpu-sub")
    try:
        short = ("--set", "execution.start_deadline_s=8", "--set", "execution.update_attempts=1")
        assert cluster.mgrpo("deploy", "team.yaml", "--run", cluster.run, *short).returncode == 0
        run = cluster.start()
        state = cluster.finished(run)
    finally:
        services.start("worker-mgrpo-gpu-sub")
    assert state.is_failed()
    assert "no worker of work pool mgrpo-gpu-sub took it within 8 s" in (state.message or "")


def _cancel(cluster: Cluster, run: UUID) -> None:
    cluster.ask(lambda client: client.set_flow_run_state(run, Cancelling()))


def _kill_flow_run(cluster: Cluster, run: UUID) -> None:
    for process in _processes_of(run):
        process.kill()


def _processes_of(run: UUID) -> list[psutil.Process]:
    return [process for process in flow_run_processes() if _flow_run_of(process) == run.hex]


def _flow_run_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "")
    except psutil.NoSuchProcess:
        return ""


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _messages(cluster: Cluster, run: UUID) -> str:
    logs = cluster.ask(lambda client: client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))))
    return "\n".join(line.message for line in logs)
