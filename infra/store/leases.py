"""Who computes an iteration: a lease in the store that its owner renews, and that is taken from the dead only.

Two starts of one iteration must not write over each other, and a killed one must not block the next. Leases of an
iteration are numbered; the newest counts. One is taken by creating the next number, of which the store lets only one
succeed, so no clocks are compared. They lie in the staging folder, and go with it after the commit.
"""

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from infra.store import layout
from infra.store.files import StoreFiles
from mgrpo_core.errors import AlreadyCommittedError, IterationTakenError

RENEW_S = 10.0
"""Between two renewals."""
DEAD_AFTER_S = 45.0
"""An owner on another machine that was not seen to renew for so long is dead."""
_STOP_S = 5.0  # longest wait for a renewal under way, when a lease is let go


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that computes an iteration.

    Attributes:
        who: for people, such as a flow run's name.
        flow_run: id of its flow run; "" where there is none.
        machine: one boot of one machine (and one process namespace of it).
        started: when the process was created, in that machine's clock: pids are used again.
    """

    who: str
    flow_run: str
    host: str
    machine: str
    pid: int
    started: float

    @classmethod
    def this_process(cls, who: str, flow_run: str = "") -> "Owner":
        started = psutil.Process().create_time()
        return cls(who, flow_run, socket.gethostname(), _machine(), os.getpid(), started)

    def __str__(self) -> str:
        return f"{self.who} (process {self.pid} on {self.host})"

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.machine == _machine()

    def is_alive_here(self) -> bool:
        """Of a process of this machine: whether it still exists."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Lease:
    """The lease of an iteration, renewed by a thread until it is released."""

    def __init__(self, files: StoreFiles, path: str, owner: Owner, taken_from: Owner | None) -> None:
        self._files = files
        self._path = path
        self._data = _json(owner)
        self._released = threading.Event()
        self.owner = owner
        self.taken_from = taken_from
        self._thread = threading.Thread(target=self._renew, name="mgrpo-lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raises: IterationTakenError if another process took the iteration, believing this one dead."""
        folder, name = self._path.rsplit("/", 1)
        newest = max(_numbers(self._files, folder), default=int(name.removesuffix(_SUFFIX)))
        if newest > int(name.removesuffix(_SUFFIX)):
            by = read_owner(self._files, f"{folder}/{newest:04d}{_SUFFIX}")
            raise IterationTakenError(
                f"{self._files.uri(folder)}: this process was not seen for {DEAD_AFTER_S:.0f} s, and the iteration was "
                f"taken over by {by or 'another process'}. Nothing was committed here; theirs continues."
            )

    def stop(self) -> None:
        """Renew no longer; the lease stays until the staging folder goes, or somebody takes it."""
        self._released.set()
        self._thread.join(_STOP_S)  # one that waits for a store that is away is left behind: it is refused later

    def release(self) -> None:
        """Renew no longer, and let the next one in at once."""
        self.stop()
        if self._files.exists(self._path):
            self._files.remove(self._path)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            try:
                self._files.write(self._path, self._data)
            except AlreadyCommittedError:
                return
            except (OSError, RuntimeError):  # a store that is away for a while: `require` decides in the end
                continue


def _tell_nobody(_: str) -> None: ...


def take_lease(
    files: StoreFiles,
    run: str,
    iteration: int,
    owner: Owner,
    *,
    on_wait: Callable[[str], None] = _tell_nobody,
    dead_after_s: float = DEAD_AFTER_S,
) -> Lease:
    """Become the one process that computes an iteration.

    A dead owner of this machine is replaced at once, one of another machine after it was not seen to renew.

    Args:
        files: the store.
        run: name of the run.
        iteration: its number.
        owner: this process.
        on_wait: told what is waited for.
        dead_after_s: see DEAD_AFTER_S.

    Raises:
        IterationTakenError: its owner is alive; names it.
    """
    what = f"iteration {iteration} of run {run!r}"
    return _take(files, layout.leases_folder(run, iteration), what, owner, on_wait, dead_after_s)


@contextmanager
def creating_run(files: StoreFiles, run: str, owner: Owner, *, patience_s: float = 600.0) -> Iterator[None]:
    """Be the one process that writes a run's first files until the block ends; wait while another one does.

    Raises: IterationTakenError if that one is still at it after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            lease = _take(files, layout.creation_folder(run), f"the start of run {run!r}", owner, _tell_nobody)
            break
        except IterationTakenError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    try:
        yield
    finally:
        lease.release()


def _take(
    files: StoreFiles,
    folder: str,
    what: str,
    owner: Owner,
    on_wait: Callable[[str], None],
    dead_after_s: float = DEAD_AFTER_S,
) -> Lease:
    while True:
        numbers = _numbers(files, folder)
        before = None
        if numbers:
            path = f"{folder}/{numbers[-1]:04d}{_SUFFIX}"
            before = read_owner(files, path)
            if before is not None:
                _require_dead(files, path, before, what, on_wait, dead_after_s)
        path = f"{folder}/{(numbers[-1] + 1 if numbers else 0):04d}{_SUFFIX}"
        try:
            files.create(path, _json(owner))
        except FileExistsError:
            continue  # another one was quicker: look who
        return Lease(files, path, owner, before)


def read_owner(files: StoreFiles, path: str) -> Owner | None:
    """Who a lease says; None if it is gone or cannot be read."""
    try:
        return Owner(**json.loads(files.read(path)))
    except (ValueError, TypeError, RuntimeError):
        return None


_SUFFIX = ".lease.json"


def _require_dead(
    files: StoreFiles,
    path: str,
    owner: Owner,
    what: str,
    on_wait: Callable[[str], None],
    dead_after_s: float,
) -> None:
    taken = IterationTakenError(
        f"{what} is being computed by {owner}. It is left to it; start again when it is done to compute what follows."
    )
    if owner.is_here():
        if owner.is_alive_here():
            raise taken
        return
    on_wait(f"{what} was begun by {owner}: watching for {dead_after_s:.0f} s if it lives.")
    first, deadline = files.identity(path), time.monotonic() + dead_after_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, dead_after_s / 4))
        try:
            if files.identity(path) != first:
                raise taken
        except FileNotFoundError:
            return  # released, or committed


def _numbers(files: StoreFiles, folder: str) -> list[int]:
    return sorted(int(name.removesuffix(_SUFFIX)) for name in files.names(folder) if name.endswith(_SUFFIX))


def _json(owner: Owner) -> bytes:
    return (json.dumps(asdict(owner), sort_keys=True) + "\n").encode()


def _machine() -> str:
    """Names one boot of one machine; containers that share a kernel but not its processes differ."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists() and namespace.exists():
        return f"{boot.read_text().strip()}/{namespace.readlink()}"
    return f"{platform.node()}/{psutil.boot_time():.0f}"
