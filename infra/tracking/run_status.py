"""A tracked run's status is the fate of the process that trains it."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from infra.tracking.tracker import Outcome, RunIdentity, Tracker


@contextmanager
def tracked(tracker: Tracker, identity: RunIdentity, config: Mapping[str, object]) -> Iterator[Tracker]:
    """Start the run, and finish it however the block is left: FINISHED, FAILED by an error, KILLED by a signal.

    SIGTERM would end Python without running any block's end: where nobody handles it yet, it is turned into SystemExit
    for as long as the block runs. Ctrl-C, cancellation and an orchestrator's own signal exceptions are no `Exception`,
    and count as killed. After SIGKILL nothing runs: the run stays RUNNING until the next `start` of its identity takes
    it up.
    """
    with _sigterm_raises():
        tracker.start(identity, config)
        outcome = Outcome.FINISHED
        try:
            yield tracker
        except Exception:
            outcome = Outcome.FAILED
            raise
        except BaseException:
            outcome = Outcome.KILLED
            raise
        finally:
            tracker.finish(outcome)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
