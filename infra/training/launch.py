"""A policy's update on several processes of this machine: start them, watch them, let none of them survive."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.training.device import require_devices
from infra.training.die_with_parent import bound, bound_to_this_process
from infra.training.rank_reports import RankError, RankReports
from infra.training.sharded_job import ShardedJob, write_job
from mgrpo_core.errors import InfrastructureError, MGRPOError
from mgrpo_core.update.policy_gradient import Progress

_log = logging.getLogger("mgrpo.training")
_ROOT = Path(__file__).parents[2]
_POLL_S = 0.2
_GRACE_S = 5  # for torchrun to stop its ranks, after which the kernel does
_TAIL_LINES = 30
_KILLED = re.compile(r"Signal \d+ \((\w+)\) received by PID \d+")


def train_in_processes(job: ShardedJob, processes: int, threads: int, on_progress: Progress | None) -> dict[str, Any]:
    """Have torchrun start the ranks, and wait for them; return the update's figures. The new version is in the target.

    The calling thread must stay until the update ends: with it, or with its process, all ranks end.

    Args:
        job: what they do.
        processes: how many.
        threads: of each.
        on_progress: told several times a second, news or not, about tokens done and in all, 0 of 1 before the first;
            what it raises ends the update.

    Raises:
        MGRPOError: the first error that a rank told of, as its own class; InfrastructureError where one was killed.
    """
    require_devices(job.order.policy, processes)
    # A rank that is being killed may still write: nothing to fail over.
    with tempfile.TemporaryDirectory(prefix="mgrpo-ranks-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        reports = RankReports(folder)
        write_job(folder, job)
        with _torchrun(folder, processes, threads) as process:
            code = _watch(process, reports, on_progress)
        figures = reports.figures()
        if code == 0 and figures is not None:
            return figures
        tail = _tail(folder)
        _log.error(
            "Ranks of the update of policy %s ended with %s; their last lines:\n%s", job.order.policy, code, tail
        )
        raise what_ended(job.order.policy, code, tail, reports.error())


@contextmanager
def _torchrun(folder: Path, processes: int, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        # The package that runs here, wherever the user stands: a folder named `infra` there is none of ours.
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",
    }
    rank = bound([sys.executable, "-m", "infra.training.sharded_update", str(folder)])
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    agent += ["--max-restarts=0", f"--shutdown-timeout={_GRACE_S}", f"--log-dir={folder}", "--no-python"]
    command = bound_to_this_process([*agent, *rank], environment)
    with (folder / "ranks.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own: Ctrl-C is ours to handle, and one signal reaches all of it
        )
    try:
        yield process
    finally:
        _stop(process)


def _watch(process: subprocess.Popen[bytes], reports: RankReports, on_progress: Progress | None) -> int:
    while True:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
        if on_progress is not None:
            done, total = reports.tokens()
            on_progress(done, max(1, total))
        if code is not None:
            return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Have torchrun stop its ranks, which are in sessions of their own; where it does not, they die with it."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(2 * _GRACE_S)
        except subprocess.TimeoutExpired:
            _log.warning("torchrun did not stop within %s s and is killed.", 2 * _GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(folder: Path) -> str:
    lines = (folder / "ranks.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def what_ended(policy: str, code: int, tail: str, told: RankError | None) -> MGRPOError:
    """The error to raise for ranks that failed: those that lose one fail too, and torchrun ends them with SIGTERM."""
    killed = next((found for found in _KILLED.finditer(tail) if found[1] != "SIGTERM"), None)
    if told is not None and (told.sure or killed is None):
        return told.raised_again()
    how = killed[0] if killed else f"torchrun ended with {code}; its last lines are in the log"
    return InfrastructureError(
        f"update of policy {policy!r}: a rank ended without a word ({how}). Where it was killed, memory most likely "
        f"ran out: lower update.micro_batch_tokens, or raise execution.update_processes.{policy}."
    )
