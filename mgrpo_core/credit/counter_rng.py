"""Random words from (key, counter): vectorised, and the same whatever else is drawn or in which order."""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Word number `counter` (from 0) of the SplitMix64 stream seeded with `key`, uint64, element by element.

    A bijection of the counter for a fixed key: two counters never give the same word.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; Vigna's constants.

    Args:
        key: uint64, any shape.
        counter: non-negative integers, a shape that broadcasts with `key`.
    """
    state = key + (counter.astype(np.uint64) + np.uint64(1)) * _GAMMA  # uint64 wraps, as the algorithm wants
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


def below(word: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Map words to integers in [0, bound), int64: floor(high 32 bits * bound / 2**32).

    Some values come up more often than others by a share below bound / 2**32. `bound` is in [1, 2**31).
    """
    return (((word >> np.uint64(32)) * bound.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
