"""One part of a reward: a number, or why there is none. Missing is never a number."""

import math
import numbers
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import numpy as np

from mgrpo_core.errors import ConfigError


class ScoreStatus(StrEnum):
    """What a missing number means."""

    SCORED = "scored"
    FAILED = "failed"  # it should have been graded, and could not be
    ABSENT = "absent"  # nobody was to grade it, or the grader said that there is nothing to grade


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a reward.

    Attributes:
        value: a finite number if and only if `status` is SCORED.
        reason: why there is no value; None where there is one.
    """

    status: ScoreStatus
    value: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        has_value = self.value is not None and math.isfinite(self.value)
        if has_value != (self.status is ScoreStatus.SCORED) or (self.value is not None and not has_value):
            raise ConfigError(
                f"component: status {self.status}, value {self.value}, expected a finite value if scored, else None."
            )


def scored(value: float) -> Component:
    """A number."""
    return Component(ScoreStatus.SCORED, float(value))


def failed(reason: str) -> Component:
    """It should have been graded."""
    return Component(ScoreStatus.FAILED, None, reason)


def absent(reason: str) -> Component:
    """It was not to be graded."""
    return Component(ScoreStatus.ABSENT, None, reason)


def component_of(returned: object, source: str, *, unit_interval: bool = False) -> Component:
    """What a grader's return value means.

    A bool or a real number (numpy scalars included) is a score, widened to a 64-bit float; None means that there was
    nothing to grade; NaN, infinity and, for `unit_interval`, a number outside [0, 1] mean that grading failed.

    Args:
        returned: what the grader returned.
        source: how to call the grader in a message.
        unit_interval: True for graders that promise a score in [0, 1].
    Raises: ConfigError on text and every other type: a grader that returns those never worked, and a retry or a skip
        would hide it.
    """
    if returned is None:
        return absent(f"{source} returned None")
    value = _plain(returned)
    if not isinstance(value, numbers.Real):  # bool is one, text is none
        raise ConfigError(
            f"{source}: returned {value!r:.80} ({type(value).__name__}), expected a number, a bool or None. "
            "Return float(...) or True/False; None where there is nothing to grade."
        )
    score = float(value)
    if not math.isfinite(score):
        return failed(f"{source} returned {score}")
    if unit_interval and not 0 <= score <= 1:
        return failed(f"{source} returned {score}, expected a number in [0, 1]")
    return scored(score)


def _plain(value: object) -> object:
    return cast("Any", value).item() if isinstance(value, np.generic) else value
