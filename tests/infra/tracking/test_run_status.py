import asyncio
import signal

import pytest

from infra.tracking.run_status import tracked
from infra.tracking.tracker import IterationRecord, MemoryTracker, Outcome, RunIdentity, Tracker

IDENTITY = RunIdentity("paper", "s3://bucket/runs")


def test_a_block_that_ends_is_finished_and_one_that_raises_has_failed() -> None:
    tracker = MemoryTracker()
    with tracked(tracker, IDENTITY, {"seed": 1}):
        assert (tracker.identity, tracker.config, tracker.outcome) == (IDENTITY, {"seed": 1}, None)
    assert tracker.outcome is Outcome.FINISHED
    with pytest.raises(ZeroDivisionError), tracked(tracker, IDENTITY, {}):
        1 / 0  # noqa: B018
    assert tracker.outcome is Outcome.FAILED


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupted_block_was_killed(kind: type[BaseException]) -> None:
    tracker = MemoryTracker()
    with pytest.raises(kind), tracked(tracker, IDENTITY, {}):
        raise kind
    assert tracker.outcome is Outcome.KILLED


def test_sigterm_ends_the_block_with_its_exit_code_and_is_handled_as_before_afterwards() -> None:
    tracker = MemoryTracker()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(SystemExit) as caught, tracked(tracker, IDENTITY, {}):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert tracker.outcome is Outcome.KILLED
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_of_sigterm_is_left_alone() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with tracked(MemoryTracker(), IDENTITY, {}):
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_the_fake_is_a_tracker_and_keeps_the_first_value_of_a_step() -> None:
    tracker = MemoryTracker()
    assert isinstance(tracker, Tracker)
    tracker.log_iteration(IterationRecord(0, {"a": 1.0, "b": float("nan")}, {"main": 1}))
    tracker.log_iteration(IterationRecord(0, {"a": 2.0}, {"main": 1}))
    assert tracker.metrics == {"a": {0: 1.0}}
    assert tracker.nonfinite == {0: ("b",)}
    assert tracker.policy_versions == {"main": 1}


def test_a_local_store_has_one_identity_however_it_is_written() -> None:
    assert RunIdentity("r", "store") == RunIdentity("r", "./other/../store")
    assert RunIdentity("r", "s3://b/p").store == "s3://b/p"
