"""Learning rate as a function of the optimiser step alone, so that a resume needs no scheduler state."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, base: float, schedule: Schedule = "constant", warmup_steps: int = 0, total_steps: int | None = None
) -> float:
    """Rate of optimiser step `step`, counted from 0 over the whole run.

    Warm-up rises linearly, base * step / warmup_steps. After it, with p the part of the way from `warmup_steps` to
    `total_steps` (at most 1): constant base; linear base * (1 - p); cosine base * (1 + cos(pi p)) / 2.

    Args:
        step: steps taken before this one, >= 0.
        base: the highest rate.
        schedule: shape after the warm-up.
        warmup_steps: length of the warm-up, >= 0.
        total_steps: where linear and cosine reach 0; ignored by constant.
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return base
    part = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return base * (1.0 - part if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part)))
