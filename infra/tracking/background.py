"""Work that nobody waits for: one thread, in order, with a deadline at the end."""

import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("mgrpo.tracking")


class Background:
    """Runs jobs one after the other in a daemon thread. A job that raises is counted; the first one is warned about.

    Args:
        name: whose jobs these are, for the thread and the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self._quiet = threading.Condition()
        self.troubles = 0

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Queue a job; `what` it does stands in the warning if it fails."""
        with self._quiet:
            self._unfinished += 1
        self._jobs.put((what, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"mgrpo-{self._name}", daemon=True)
            self._thread.start()

    def wait(self, deadline_s: float) -> bool:
        """Wait until every job has run, at most so long. False, with a warning, if some have not."""
        end = time.monotonic() + deadline_s
        with self._quiet:
            while self._unfinished and (left := end - time.monotonic()) > 0:
                self._quiet.wait(left)
            late = self._unfinished
            self.troubles += late
        if late:
            _log.warning("%s: %d records were not stored within %g s; left behind.", self._name, late, deadline_s)
        return late == 0

    def _work(self) -> None:
        while True:
            what, job = self._jobs.get()
            try:
                job()
            except Exception as error:
                self.troubles += 1
                if self.troubles == 1:
                    _log.warning(
                        "%s: %s failed (%s: %s). Training goes on; the store has every number. Further trouble is "
                        "counted, not repeated.",
                        self._name,
                        what,
                        type(error).__name__,
                        error,
                    )
            finally:
                with self._quiet:
                    self._unfinished -= 1
                    self._quiet.notify_all()
