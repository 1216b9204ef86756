"""Sums of two digits as questions: the least that a language model of 135 M parameters gets right now and then."""

import hashlib
from functools import lru_cache

from mgrpo_core.trajectories import Query

HELD_OUT_SHARE = 0.2


@lru_cache(maxsize=2)
def sums(split: str) -> tuple[Query, ...]:
    """The 81 sums of 1 to 9 and 1 to 9, cut by the hash of each sum.

    Args:
        split: `train` or `held_out`; 4 + 3 is on the side of 3 + 4.
    """
    return tuple(
        Query(f"{a}+{b}", f"What is {a} + {b}?", (str(a + b),))
        for a in range(1, 10)
        for b in range(1, 10)
        if _is_held_out(a, b) == (split == "held_out")
    )


def _is_held_out(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return digest[0] < 256 * HELD_OUT_SHARE
