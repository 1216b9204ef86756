"""Servers as processes of ours, played by a program that answers `/health`: starts, deaths, and what is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.local_servers import LocalServers
from infra.serving.vllm.probe import Probe
from infra.serving.vllm.replica import ServedAdapter, ServedVersion
from infra.serving.vllm.server_process import ServerProcess
from mgrpo_core.errors import PolicyServerError

PLAY = """
    import http.server, os, subprocess, sys
    port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--port="))
    if "broken" in sys.argv[-1]:
        print("no such architecture", flush=True)
        sys.exit(3)
    subprocess.Popen(["sleep", "600"])  # as vLLM's engine: a process of its own
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if "deaf" not in sys.argv[-1] else 503)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def build(tmp_path: Path) -> VllmBuild:
    (tmp_path / "play.py").write_text(textwrap.dedent(PLAY), encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/play.py "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return VllmBuild(python, "0.32.0")


@pytest.fixture
def servers(build: VllmBuild, tmp_path: Path) -> Iterator[LocalServers]:
    servers = LocalServers("main", 2, build, tmp_path / "logs", 30)
    yield servers
    servers.stop()


@pytest.fixture
def wanted(tmp_path: Path) -> ServedVersion:
    nothing = Probe(None, (), torch.empty(0))  # type: ignore[arg-type]
    return ServedVersion("main", 0, "main/0/a", tmp_path, "float32", 384, (), nothing)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def alive_in_group(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            found.append(int(entry.name))
    return found


def test_servers_start_when_they_are_needed_and_end_with_everything_they_started(
    servers: LocalServers, wanted: ServedVersion
) -> None:
    one, two = servers.urls
    assert one != two
    servers.ensure(one, wanted)
    assert (answers(one), answers(two)) == (True, False)
    group = servers._running[one].pid
    servers.ensure(one, wanted)
    assert servers._running[one].pid == group
    assert len(alive_in_group(group)) == 2
    servers.stop()
    servers.stop()
    assert alive_in_group(group) == []
    with pytest.raises(PolicyServerError, match="its servers were stopped"):
        servers.ensure(one, wanted)


@pytest.mark.parametrize("rank", [None, 2])
def test_there_is_room_for_the_adapter_that_a_policy_begins_with_although_it_trains_none(
    servers: LocalServers, wanted: ServedVersion, tmp_path: Path, rank: int | None
) -> None:
    if rank is not None:
        (tmp_path / "adapter_config.json").write_text(f'{{"r": {rank}}}', encoding="utf-8")
        wanted = replace(wanted, adapter=ServedAdapter("main/0/a+1/b", tmp_path))
    servers.ensure(servers.urls[0], wanted)
    (process,) = servers._running.values()
    command = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8").split("\0")
    assert ("--max-lora-rank=8" in command) is (rank is not None)


def test_a_server_that_was_killed_is_started_again_on_its_port(servers: LocalServers, wanted: ServedVersion) -> None:
    url = servers.urls[0]
    servers.ensure(url, wanted)
    first = servers._running[url].pid
    os.kill(first, signal.SIGKILL)
    while servers._running[url].exit_code is None:
        time.sleep(0.01)
    servers.ensure(url, wanted)
    assert answers(url)
    assert alive_in_group(first) == []


def test_the_server_of_somebody_else_is_left_alone(servers: LocalServers, wanted: ServedVersion) -> None:
    servers.ensure("http://gpu-1:8000", wanted)
    assert servers._running == {}


def started(build: VllmBuild, tmp_path: Path, how: str) -> ServerProcess:
    settings = ServerSettings("main", tmp_path, "float32", 384, "127.0.0.1", 15_999, (how,))
    return ServerProcess(build, settings, tmp_path / "log")


def test_a_server_that_ends_before_it_answers_is_told_with_its_last_words(build: VllmBuild, tmp_path: Path) -> None:
    with (
        started(build, tmp_path, "--broken") as process,
        pytest.raises(PolicyServerError, match=r"(?s)policy 'main' ended with exit code 3.*no such architecture"),
    ):
        process.wait_until_it_answers(30)


def test_a_server_that_stays_silent_is_waited_for_no_longer_than_the_deadline(build: VllmBuild, tmp_path: Path) -> None:
    with (
        started(build, tmp_path, "--deaf") as process,
        pytest.raises(
            PolicyServerError, match=r"did not answer at http://127\.0\.0\.1:15999 within 0\.5 s.*start_dead"
        ),
    ):
        process.wait_until_it_answers(0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal to children is Linux's")
def test_a_server_does_not_outlive_the_process_that_started_it(build: VllmBuild, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from infra.serving.vllm.build import VllmBuild
        from infra.serving.vllm.command import ServerSettings
        from infra.serving.vllm.server_process import ServerProcess
        settings = ServerSettings("main", Path("."), "float32", 384, "127.0.0.1", 15998)
        process = ServerProcess(VllmBuild(Path({str(build.python)!r}), "0"), settings, Path({str(tmp_path / "log")!r}))
        process.wait_until_it_answers(30)
        print(process.pid, flush=True)
        input()
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while server in alive_in_group(server):
        assert time.monotonic() < end
        time.sleep(0.05)
    for orphan in alive_in_group(server):  # vLLM's own processes notice; the player's do not
        os.kill(orphan, signal.SIGKILL)
