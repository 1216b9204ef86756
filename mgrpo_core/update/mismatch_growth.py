"""Whether sampler and trainer drift apart over iterations: a rule on a policy's last few mismatch figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RECENT = 3
EARLIER = 10
FEWEST_EARLIER = 3
LEAST = 0.01
"""Nats a token. Below, a ratio is off by less than 1 %, and float32's 1e-6 may double as it likes."""
FACTOR = 1.5
"""Medians of a steady run differ by less; what grows by 7 % an iteration gets there."""


@dataclass(frozen=True, slots=True)
class MismatchGrowth:
    """Median |trainer - sampler log-prob|, nats a token, of the earlier and of the newest iterations."""

    earlier: float
    recent: float


def mismatch_growth(series: Sequence[float | None]) -> MismatchGrowth | None:
    """The growth that deserves a warning, or None.

    The median of the last RECENT figures against that of up to EARLIER before them: one odd iteration is no growth.
    There is one where the newer median is at least LEAST and at least FACTOR times the older.

    Args:
        series: `mismatch_mean` by iteration, oldest first; None where nothing was trained.
    """
    known = [value for value in series if value is not None]
    earlier, recent = known[-RECENT - EARLIER : -RECENT], known[-RECENT:]
    if len(earlier) < FEWEST_EARLIER:
        return None
    growth = MismatchGrowth(median(earlier), median(recent))
    return growth if growth.recent >= max(LEAST, FACTOR * growth.earlier) else None
