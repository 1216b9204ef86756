"""The command `mgrpo serve`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.load_config import config_from
from infra.progress import ProgressBoard
from infra.resources import open_resources
from infra.serving.vllm.build import PYTHON_VARIABLE, VllmBuild
from infra.serving.vllm.local_servers import _free_ports
from infra.store.runs import open_store
from tests.flows.small_team import config_of, save_policies, save_queries


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `team`, which has version 0 of its policies and no iteration."""
    folder = save_policies(tmp_path_factory.mktemp("team"))
    config = config_from(config_of(folder, save_queries(folder / "queries.jsonl")), "team")
    store = tmp_path_factory.mktemp("store")
    with open_resources(open_store(str(store)), "team", config, progress=ProgressBoard(shown=False)):
        return store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["main", "--run", "other"], "no run 'other'. Runs there: team"),
        (["judge", "--run", "team"], "policy 'judge': run 'team' has none of this name. Name one of: main, sub"),
        (["main", "--run", "team", "--version", "3"], "version 3 of policy 'main' is missing"),
    ],
)
def test_what_cannot_be_served_is_refused(build: VllmBuild, store: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["serve", *arguments, "--store", str(store), "--python", str(build.python)])
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_without_vllm_the_command_that_installs_it_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    done = CliRunner().invoke(app, ["serve", "main", "--run", "team", "--store", str(store)])
    assert done.exit_code == 2
    assert "make vllm" in done.stderr


@pytest.mark.timeout(600)
def test_a_server_serves_its_version_until_it_is_told_to_end(build: VllmBuild, store: Path, tmp_path: Path) -> None:
    port = _free_ports(1)[0]
    command = [
        sys.executable, "-m", "flows.cli", "serve", "sub", "--run", "team", "--store", str(store), "--port", str(port),
        "--python", str(build.python), "--cache", str(tmp_path / "cache"), "--max-num-seqs", "7",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        label = wait_for_label(process, port, tmp_path / "log")
        assert label.startswith("sub/0/")
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("sub", 384)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert f"Policy sub, version 0, answers at http://127.0.0.1:{port}" in said
    assert "'max_num_seqs': 7" in said  # what is not ours goes to vLLM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    assert processes_of(build.python, port) == []


def wait_for_label(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """What the server calls its weights, once it calls them anything of ours."""
    label = "default"
    while label == "default":
        assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
        time.sleep(0.5)
        try:
            label = httpx.get(f"http://127.0.0.1:{port}/weight_info", trust_env=False).json()["weight_version"]
        except httpx.HTTPError:
            continue
    return label


def processes_of(python: Path, port: int) -> list[str]:
    """Command lines of processes that serve at the port."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if entry.name != str(os.getpid()) and str(python) in line and f"--port={port}" in line:
            found.append(line)
    return found
