"""Whole iterations on two real vLLM servers, a Qwen3's and a Llama's. Skipped where `make vllm` has not been run."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.local_servers import _free_ports
from infra.serving.vllm.server_process import ServerProcess
from tests.flows.program import Ended, Program, Running
from tests.flows.small_team import save_config
from tests.flows.stored import iteration_folder, metrics_of, rows_of, versions_of
from tests.flows.two_families import (
    check_that_each_kept_to_its_own_family,
    config_of_two_families,
    save_two_families,
)
from tests.servers.vllm_build import vllm_build

# servers have to start: half a minute each, or two on busy cores
pytestmark = pytest.mark.timeout(1200)
START_S = 500.0
CONTEXT = 384


class RealServers:
    """A vLLM server for each policy, which can be killed and started again on its port."""

    def __init__(self, build: VllmBuild, folder: Path, logs: Path) -> None:
        self._build = build
        self._logs = logs
        self._settings = {
            policy: ServerSettings(policy, folder / policy, "float32", CONTEXT, "127.0.0.1", port)
            for policy, port in zip(("main", "sub"), _free_ports(2), strict=True)
        }
        self._running: dict[str, ServerProcess] = {}

    def url(self, policy: str) -> str:
        return f"http://127.0.0.1:{self._settings[policy].port}"

    def start(self, *policies: str) -> None:
        """Start, side by side, and wait until they answer."""
        for policy in policies:
            self._running[policy] = ServerProcess(self._build, self._settings[policy], self._logs / policy)
        for policy in policies:
            self._running[policy].wait_until_it_answers(START_S)

    def kill(self, policy: str) -> None:
        """As the system kills."""
        process = self._running.pop(policy)
        os.kill(process.pid, signal.SIGKILL)
        process.stop()  # its engine, which would hold the memory a while longer

    def answered(self, policy: str) -> float:
        """Requests that the server has ended well since it started."""
        told = httpx.get(f"{self.url(policy)}/metrics", trust_env=False, timeout=30).text
        return sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", told, re.MULTILINE)))

    def stop(self) -> None:
        for process in self._running.values():
            process.stop()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def servers(families: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServers]:
    made = RealServers(vllm_build(servers=2), families, tmp_path_factory.mktemp("logs"))
    try:
        made.start("main", "sub")
        yield made
    finally:
        made.stop()


def config_with(families: Path, servers: RealServers, *, deadline_s: float, **rollout: Any) -> dict[str, Any]:
    config = config_of_two_families(families)
    for policy in ("main", "sub"):
        config["policies"][policy]["servers"] = [servers.url(policy)]
        config["policies"][policy]["serving"] = {"deadline_s": deadline_s}
    config["rollout"] |= rollout
    return config


def start(program: Program, config: dict[str, Any], folder: Path) -> Running:
    return program.start("train", save_config(folder / "run.yaml", config), "--run", "r", "--store", folder / "store")


def train(program: Program, config: dict[str, Any], folder: Path) -> Ended:
    return start(program, config, folder).wait(600)


def kill_in_mid_rollout(servers: RealServers, policy: str, running: Running) -> float:
    """Kill the server once it has answered some turns on top of what proved its version; when that was."""
    before = servers.answered(policy)
    proof = 16
    while servers.answered(policy) < before + proof + 5:
        assert running.process.exitcode is None, "the rollouts were over before the server was killed"
        time.sleep(0.01)
    servers.kill(policy)
    return time.monotonic()


def test_a_qwen_and_a_llama_on_a_server_each_are_rolled_out_and_trained_together(
    program: Program, families: Path, servers: RealServers, tmp_path: Path
) -> None:
    ended = train(program, config_with(families, servers, deadline_s=60), tmp_path)
    assert ended.code == 0, ended.err
    check_that_each_kept_to_its_own_family(tmp_path / "store")
    for policy in ("main", "sub"):
        label = httpx.get(f"{servers.url(policy)}/weight_info", trust_env=False).json()["weight_version"]
        assert label.startswith(f"{policy}/1/")


def test_a_server_killed_in_mid_rollout_and_started_again_lets_the_iteration_finish(
    program: Program, families: Path, servers: RealServers, tmp_path: Path
) -> None:
    size = {"queries_per_iteration": 6, "rollouts_per_query": 32, "concurrency": 8}
    running = start(program, config_with(families, servers, deadline_s=START_S, **size), tmp_path)
    kill_in_mid_rollout(servers, "sub", running)
    servers.start("sub")
    ended = running.wait(600)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    assert versions_of(store, "main") == versions_of(store, "sub") == ["00000000", "00000001"]
    metrics = metrics_of(store)
    assert metrics["main/trajectories"] == 6 * 32
    rewards = {row["trajectory_id"]: row["reward"] for row in rows_of(store, "rewards")}
    included = {row["trajectory_id"] for row in rows_of(store, "advantages") if row["included"]}
    for agent in ("main", "searcher"):
        rows = rows_of(store, f"trajectories/{agent}-0000")
        lost = {row["trajectory_id"] for row in rows if row["status"] == "infra_failed"}
        assert metrics[f"{agent}/infra_failed"] == len(lost)
        assert all(rewards[one] is None for one in lost)
        assert not lost & included
        assert {turn["policy_version"] for row in rows for turn in row["turns"]} == {0}
    # what was sampled before the kill and what after it is of the same weights
    assert metrics["update/sub/mismatch_max"] < 1e-4


def test_a_server_killed_for_good_stops_the_iteration_in_its_deadline_and_by_its_name(
    program: Program, families: Path, servers: RealServers, tmp_path: Path
) -> None:
    size = {"queries_per_iteration": 6, "rollouts_per_query": 32, "concurrency": 8, "min_scored_share": 0.9}
    deadline_s = 15.0
    running = start(program, config_with(families, servers, deadline_s=deadline_s, **size), tmp_path)
    killed = kill_in_mid_rollout(servers, "sub", running)
    ended = running.wait(600)
    seconds = time.monotonic() - killed

    assert ended.code == 1
    assert "IncompleteIterationError: r-0000: " in ended.err
    assert f"no server of policy 'sub' ({servers.url('sub')}) has answered for" in ended.err
    assert f"(serving.deadline_s {deadline_s:g})" in ended.err
    assert seconds < 3 * deadline_s, "once for all rollouts, the end of the process included"
    assert not (iteration_folder(tmp_path / "store") / "manifest.json").exists()
