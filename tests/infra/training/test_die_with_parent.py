"""A chain of three processes: the last two in sessions of their own, as torchrun's ranks are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.training.die_with_parent import bound, bound_to_this_process

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")

_FIRST = """
import os, subprocess, sys, time
from infra.training.die_with_parent import bound, bound_to_this_process
second = [sys.executable, "-c", sys.argv[2], sys.argv[1], *bound([sys.executable, "-c", "import time; time.sleep(60)"])]
environment = dict(os.environ)
command = bound_to_this_process(second, environment)
subprocess.Popen(command, env=environment, start_new_session=True)
time.sleep(60)
"""
_SECOND = """
import os, subprocess, sys, time
third = subprocess.Popen(sys.argv[2:], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {third.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a container may lack an init that reaps


def until(true, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


def test_a_killed_process_takes_those_below_it_along(tmp_path):
    pids = tmp_path / "pids"
    first = subprocess.Popen([sys.executable, "-c", _FIRST, str(pids), _SECOND], cwd=ROOT)
    try:
        until(pids.exists, 30)
        below = [int(pid) for pid in pids.read_text().split()]
        until(lambda: b"sleep" in Path(f"/proc/{below[1]}/cmdline").read_bytes(), 30)
        assert all(alive(pid) for pid in below)
    finally:
        first.kill()
        first.wait()
    until(lambda: not any(alive(pid) for pid in below), 5)


def test_a_process_whose_parent_is_gone_already_does_not_start():
    command = bound([sys.executable, "-c", "print('started')"])
    gone = os.environ | {"MGRPO_PARENT_PID": "1"}
    done = subprocess.run(command, env=gone, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is gone already" in done.stderr


def test_a_folder_named_infra_where_the_user_stands_changes_nothing(tmp_path):
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra/__init__.py").write_text("raise RuntimeError('the user's own')")
    environment = dict(os.environ)
    command = bound_to_this_process([sys.executable, "-c", "print('started')"], environment)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("started\n", "")
