"""Ctrl-C in a terminal reaches all of the process group: a run with Prefect's temporary server ends soon, in words."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
_START_S = 240  # imports, and a server's tables, on cores that are shared
_END_S = 60  # of which 50 are for cores that are shared; with the server in its group a run took minutes


@dataclass(frozen=True, slots=True)
class Command:
    """`mgrpo train` as a shell starts it: the leader of a process group."""

    process: "subprocess.Popen[bytes]"
    said: Path
    home: Path

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + _START_S
        while not true():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)

    def all(self) -> list[psutil.Process]:
        """This and what it started, in its group or not, its parent alive or not."""
        found: list[psutil.Process] = []
        for one in psutil.process_iter():
            try:
                if one.environ().get("PREFECT_HOME") == str(self.home) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except psutil.Error:
                continue
        return found

    def server(self) -> list[psutil.Process]:
        return [one for one in self.all() if one.pid != self.process.pid and "uvicorn" in one.cmdline()]

    def ctrl_c(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(_END_S)


@pytest.fixture
def train(team: Path, tmp_path: Path) -> Iterator[Callable[[], Command]]:
    home = tmp_path / "prefect"
    started: list[Command] = []

    def start() -> Command:
        said = tmp_path / f"said-{len(started)}"
        line = ["train", team / "run.yaml", "--run", "r", "--store", tmp_path / "store", "--iterations", "2"]
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *line],
                cwd=ROOT,
                env=os.environ | {"PREFECT_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(Command(process, said, home))
        return started[-1]

    yield start
    for one in started:
        for left in one.all():
            left.kill()
        one.process.wait()


def _ended_in_words(command: Command, code: int) -> None:
    said = command.said.read_text()
    assert code == 130, said
    assert said.rstrip().endswith("Interrupted. What is staged or committed is kept; the same command continues."), said
    assert "Traceback" not in said
    assert command.all() == []


@pytest.mark.timeout(900)
def test_ctrl_c_ends_a_run_while_its_server_starts_and_while_it_works(train, tmp_path):
    starting = train()
    starting.until(starting.server)
    assert os.getpgid(starting.server()[0].pid) != os.getpgid(starting.process.pid)
    _ended_in_words(starting, starting.ctrl_c())

    working = train()
    working.until(lambda: list((tmp_path / "store").glob("r/iterations/*/trajectories/*.parquet")))
    _ended_in_words(working, working.ctrl_c())


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a server with whoever started it")
def test_a_killed_run_leaves_no_server(train):
    command = train()
    command.until(command.server)
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + 5
    while command.all() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert command.all() == []
