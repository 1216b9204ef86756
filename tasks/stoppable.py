"""Long work in a thread that stops soon after its task is cancelled: Python cannot interrupt a thread."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Move = Callable[[int, int], None]
"""Told how much is done, and of how much."""


class StoppedError(Exception):
    """Raised inside the thread; nobody is left to see it."""


async def stoppable(work: Callable[[Move], T], move: Move) -> T:
    """Run `work` in a thread, given a callback that it calls as it gets on.

    Once the awaiting task is cancelled, the next call of that callback ends the work. Without this a cancelled update
    would compute on until the process is killed.
    """
    stop = threading.Event()

    def moved(done: int, total: int) -> None:
        if stop.is_set():
            raise StoppedError
        move(done, total)

    try:
        return await asyncio.to_thread(work, moved)
    except asyncio.CancelledError:
        stop.set()
        raise
