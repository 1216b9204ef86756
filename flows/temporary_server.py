"""Prefect's settings for `mgrpo` on a machine without a Prefect server: a temporary one, lean and patient.

Set as environment defaults before Prefect is imported: what the user has set stays. With PREFECT_API_URL set, the runs
go to that server, and only the console is kept quiet and the heart beats as there.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_CONSOLE = {
    "PREFECT_LOGGING_LEVEL": "WARNING",  # stages are told by bars and one line an iteration, not by a line a task
    "DO_NOT_TRACK": "1",
    # On a server that others watch, a run that says nothing for 90 s is taken for dead.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}
_TEMPORARY_SERVER = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # 20 are too few on a busy laptop
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # it is stopped in the middle of its work, and says so at length
    # Nobody schedules, triggers or waits on a server that ends with the command. Without these an iteration's
    # orchestration took 0.13 s instead of 0.22 s.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
}


async def wait_for_server() -> None:
    """Start the temporary server, or reach the one that is configured, before anything is timed or half done."""
    from prefect import get_client  # not before `prepare`
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        with _interrupted_at_once():
            from flows.undisturbed_server import UndisturbedServer  # all of Prefect's server is imported

            UndisturbedServer().start()
    # At the end it says how many events are still on their way; the server that they go to ends with the command.
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)
    async with get_client() as client:
        await client.hello()


def prepare() -> None:
    """Fill in the defaults. Call before anything imports Prefect."""
    defaults = dict(_CONSOLE)
    if not os.environ.get("PREFECT_API_URL"):
        defaults |= _TEMPORARY_SERVER
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """An event loop holds Ctrl-C back until the next `await`: for all the seconds in which the server starts."""
    held_back = signal.getsignal(signal.SIGINT)
    if not callable(held_back):  # ignored, as a shell script's `mgrpo train &` is started
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held_back)
