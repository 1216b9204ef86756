"""Processes of a home, found by a mark in their environment, which all that they start inherits.

Flow runs live in sessions of their own and outlive a killed worker; services outlive a killed supervisord.
"""

import contextlib
import os
import time

import psutil

from infra.deploy.local.home import LocalHome

MARK = "MGRPO_UP_HOME"
_TERM_DEADLINE_S = 5.0
_KILL_DEADLINE_S = 10.0


def mark_of(home: LocalHome) -> dict[str, str]:
    """What supervisord gets into its environment."""
    return {MARK: str(home.folder)}


def find_leftovers(home: LocalHome) -> list[psutil.Process]:
    """All processes with the home's mark, but for this one and those above it."""
    me = psutil.Process()
    spared = {me.pid, *(parent.pid for parent in me.parents())}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or somebody else's
            marked = process.environ().get(MARK) == str(home.folder)
            if marked and process.pid not in spared and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_leftovers(home: LocalHome) -> int:
    """SIGTERM to each, then SIGKILL until none is left; how many there were."""
    found = find_leftovers(home)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _wait_until_gone(found, _TERM_DEADLINE_S)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    # Looked for again each time: they may have started more.
    while (remaining := find_leftovers(home)) and time.monotonic() < deadline:
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_until_gone(remaining, 1.0)
    return len(found)


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent to notice counts as gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_until_gone(processes: list[psutil.Process], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while any(is_alive(process.pid) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def inherited_environment() -> dict[str, str]:
    """This process's environment without what would set up services or their clients otherwise than we do."""
    ours = ("PREFECT_", "AWS_", "MLFLOW_", "MGRPO_", "PG")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
