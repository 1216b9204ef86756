"""Let work that must not be cut short be done before Ctrl-C or SIGTERM count."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is done, then let the first of them count.

    In the main thread only: others are not interrupted by signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    # Not a signal mask: that holds for one thread, and numpy's own threads would take the signal instead.
    before = {one: signal.signal(one, lambda number, _: held.append(number)) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        if held:
            signal.raise_signal(held[0])
