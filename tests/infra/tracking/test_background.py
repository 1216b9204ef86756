import logging
import threading

import pytest

from infra.tracking.background import Background


def test_jobs_run_in_order_and_elsewhere() -> None:
    background, seen = Background("test"), list[object]()
    for i in range(20):
        background.submit("counting", lambda i=i: seen.append((i, threading.current_thread().name)))
    assert background.wait(10)
    assert seen == [(i, "mgrpo-test") for i in range(20)]


def test_a_job_that_raises_stops_nothing_and_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    background, seen = Background("test"), list[int]()
    for i in range(3):
        background.submit(f"job {i}", lambda: [][0])
    background.submit("last", lambda: seen.append(1))
    assert background.wait(10)
    assert (background.troubles, seen) == (3, [1])
    assert [r.getMessage().split(".")[0] for r in caplog.records] == [
        "test: job 0 failed (IndexError: list index out of range)"
    ]


def test_waiting_ends_at_its_deadline_and_says_what_was_left(caplog: pytest.LogCaptureFixture) -> None:
    background, release = Background("test"), threading.Event()
    background.submit("hanging", lambda: release.wait(10) and None)
    background.submit("behind it", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert not background.wait(0.05)
    assert background.troubles == 2
    assert "2 records were not stored within 0.05 s" in caplog.text
    release.set()
    assert background.wait(10)
