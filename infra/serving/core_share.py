"""Cores shared by the engines of a process: two at work take half each, one alone takes all."""

import os
import threading

import torch

_lock = threading.Lock()
_busy: set[int] = set()


class CoreShare:
    """One engine's claim on the cores. `busy` and `idle` are called by the engine's own thread.

    torch keeps its number of threads per calling thread, so engines do not disturb each other or the flow.

    Args:
        threads: always this many; None = cores of the machine divided by the engines at work, at least 1.
    """

    def __init__(self, threads: int | None) -> None:
        self._fixed = threads
        self._set_to = 0

    def busy(self) -> None:
        """Say that this engine is about to step; take its share."""
        with _lock:
            _busy.add(id(self))
            share = self._fixed or max(1, cores() // len(_busy))
        if share != self._set_to:
            torch.set_num_threads(share)
            self._set_to = share

    def idle(self) -> None:
        """Say that this engine has nothing to do."""
        with _lock:
            _busy.discard(id(self))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
