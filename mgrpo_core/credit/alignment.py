"""Alignment: every rollout gets d sub-agent slots, however often it delegated (M-GRPO §4.1, Fig. 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mgrpo_core.credit.counter_rng import below, mix
from mgrpo_core.errors import ConfigError, ShapeError
from mgrpo_core.seeds import entropy_of

AlignmentMode = Literal["random", "weighted", "none"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which trajectory fills which slot. Indices and weights only: tokens stay where they are.

    Rows are sorted by rollout, then slot. All arrays are [M].

    Attributes:
        rollout_M: index of the rollout, int64.
        slot_M: number of the slot in its rollout, int64; 0 .. d-1 in `random`, 0 .. d_k-1 where each comes once.
        member_M: index of the trajectory in the slot, int64; -1 = empty slot, whose weight is 0.
        copy_M: how many earlier slots of the rollout hold the same trajectory, int64; 0 = the original.
        weight_M: multiplicity of the row in statistics and loss, float64.
    """

    rollout_M: np.ndarray
    slot_M: np.ndarray
    member_M: np.ndarray
    copy_M: np.ndarray
    weight_M: np.ndarray


@dataclass(frozen=True, slots=True)
class AlignmentCounts:
    """What an alignment did, for reports.

    Attributes:
        rollouts: all of them, those without a sub-trajectory included.
        empty_rollouts: d_k = 0; they are in no group.
        overfull_rollouts: d_k > d; above a few percent d was chosen too small (M-GRPO Eq. 11 wants 1 %).
        copies: slots filled with a trajectory that an earlier slot holds.
        dropped: trajectories in no slot.
    """

    rollouts: int
    empty_rollouts: int
    overfull_rollouts: int
    copies: int
    dropped: int


def rollout_keys(
    seed: int, iteration: int, agent: str, query_ids: Sequence[str], rollout_indices: Sequence[int]
) -> np.ndarray:
    """One key a rollout, uint64 [R], a function of (run seed, iteration, agent, query, rollout index) alone.

    Equal keys give equal picks, so a retry, a resume and a replay align alike, whatever the order of the rollouts.

    Raises:
        ShapeError: if the two sequences differ in length.
    """
    if len(query_ids) != len(rollout_indices):
        raise ShapeError(
            f"rollout_keys: {len(query_ids)} query ids but {len(rollout_indices)} rollout indices. "
            "Pass one of each per rollout."
        )
    words = (
        entropy_of(seed, "alignment", iteration, agent, query_id, int(index)) & 0xFFFF_FFFF_FFFF_FFFF
        for query_id, index in zip(query_ids, rollout_indices, strict=True)
    )
    return np.fromiter(words, dtype=np.uint64, count=len(query_ids))


def align(rollout_N: np.ndarray, rollout_key_R: np.ndarray, d: int, mode: AlignmentMode = "random") -> Alignment:
    """Fill the slots of every rollout from its sub-trajectories.

    With d_k sub-trajectories in rollout k:

    - `random` (M-GRPO §4.1): d_k <= d keeps all and appends d - d_k copies, each drawn uniformly with replacement from
      1 .. d_k; d_k > d keeps d drawn uniformly without replacement, in call order. The expected multiplicity of a
      trajectory is d / d_k either way.
    - `weighted`: each once with weight d / d_k: the expectation of `random` without its noise, its copies or its drops.
    - `none`: each once with weight 1, so a rollout counts as often as it delegated (ablation).

    A rollout with d_k = 0 has d empty slots of weight 0 in `random` and `weighted`, and no row in `none`.

    Chance comes from counters, not from a stream: slot or member number n of a rollout draws `mix(key, n)`, so the
    picks of one rollout do not depend on the others. A copy is drawn with a bias below d_k / 2**32.

    Args:
        rollout_N: rollout index of each trajectory, integers in [0, R), shape [N]; N = 0 is fine. Trajectories of one
            rollout stand in call order; rollouts may be interleaved.
        rollout_key_R: one uint64 a rollout, from `rollout_keys`, shape [R].
        d: slots of a rollout, >= 1.
        mode: see above.

    Raises:
        ShapeError: if an array has another shape or a rollout index lies outside [0, R).
        ConfigError: if d < 1 or the mode is unknown.
    """
    if d < 1:
        raise ConfigError(f"align: d is {d}, expected at least 1. Choose the 99th percentile of d_k (M-GRPO Eq. 11).")
    if mode not in get_args(AlignmentMode):
        raise ConfigError(f"align: mode {mode!r}, expected one of {', '.join(get_args(AlignmentMode))}.")
    rollout_N = _checked_rollouts(rollout_N, rollout_key_R)
    count_R = np.bincount(rollout_N, minlength=len(rollout_key_R))
    by_rollout_N = np.argsort(rollout_N, kind="stable")
    first_R = np.cumsum(count_R) - count_R
    if mode == "random":
        return _random(by_rollout_N, first_R, count_R, rollout_key_R, d)
    return _each_once(by_rollout_N, first_R, count_R, d, mode)


def member_weight(alignment: Alignment, members: int) -> np.ndarray:
    """Total multiplicity of each distinct trajectory, float64 [N]; 0 = in no slot.

    Args:
        alignment: from `align`.
        members: N, the number of trajectories that were aligned.

    Raises:
        ShapeError: if the alignment names a trajectory beyond N.
    """
    filled = alignment.member_M >= 0
    weight_N = np.bincount(alignment.member_M[filled], weights=alignment.weight_M[filled], minlength=members)
    if len(weight_N) > members:
        raise ShapeError(
            f"member_weight: the alignment holds trajectory {len(weight_N) - 1}, but members is {members}. "
            "Pass the length of the rollout_N that was aligned."
        )
    return weight_N


def alignment_counts(alignment: Alignment, rollout_N: np.ndarray, rollouts: int, d: int) -> AlignmentCounts:
    """Count what `align` did with `rollout_N` over `rollouts` rollouts."""
    count_R = np.bincount(rollout_N, minlength=rollouts) if len(rollout_N) else np.zeros(rollouts, np.int64)
    in_a_slot = np.unique(alignment.member_M[alignment.member_M >= 0])
    return AlignmentCounts(
        rollouts=rollouts,
        empty_rollouts=int((count_R == 0).sum()),
        overfull_rollouts=int((count_R > d).sum()),
        copies=int((alignment.copy_M > 0).sum()),
        dropped=len(rollout_N) - len(in_a_slot),
    )


def _checked_rollouts(rollout_N: np.ndarray, rollout_key_R: np.ndarray) -> np.ndarray:
    if rollout_key_R.ndim != 1 or rollout_key_R.dtype != np.uint64:
        raise ShapeError(
            f"align: rollout_key_R is {rollout_key_R.dtype} of shape {rollout_key_R.shape}, expected uint64 [R]. "
            "Make it with rollout_keys."
        )
    if rollout_N.ndim != 1 or (rollout_N.size and rollout_N.dtype.kind not in "iu"):
        raise ShapeError(
            f"align: rollout_N is {rollout_N.dtype} of shape {rollout_N.shape}, expected integers [N]: "
            "the rollout index of each trajectory."
        )
    checked = rollout_N.astype(np.int64)
    outside = np.flatnonzero((checked < 0) | (checked >= len(rollout_key_R)))
    if outside.size:
        raise ShapeError(
            f"align: trajectory {outside[0]} is of rollout {checked[outside[0]]}, but there are {len(rollout_key_R)} "
            "keys. Pass one key per rollout, rollouts without sub-trajectories included."
        )
    return checked


def _each_once(
    by_rollout_N: np.ndarray, first_R: np.ndarray, count_R: np.ndarray, d: int, mode: AlignmentMode
) -> Alignment:
    row_count_R = np.where(count_R == 0, d, count_R) if mode == "weighted" else count_R
    rollout_M, slot_M = _rows(row_count_R)
    filled_M = count_R[rollout_M] > 0
    member_M = np.full(len(rollout_M), -1, dtype=np.int64)
    member_M[filled_M] = by_rollout_N[(first_R[rollout_M] + slot_M)[filled_M]]
    weight_M = np.zeros(len(rollout_M))
    weight_M[filled_M] = d / count_R[rollout_M[filled_M]] if mode == "weighted" else 1.0
    return Alignment(rollout_M, slot_M, member_M, np.zeros_like(slot_M), weight_M)


def _random(
    by_rollout_N: np.ndarray, first_R: np.ndarray, count_R: np.ndarray, rollout_key_R: np.ndarray, d: int
) -> Alignment:
    rollout_M, slot_M = _rows(np.full(len(count_R), d, dtype=np.int64))
    number_M = np.full(len(rollout_M), -1, dtype=np.int64)  # of the member in its rollout
    copy_M = np.zeros_like(number_M)

    count_M = count_R[rollout_M]
    original_M = (slot_M < count_M) & (count_M <= d)
    number_M[original_M] = slot_M[original_M]

    drawn = np.flatnonzero((slot_M >= count_M) & (count_M > 0))
    word = mix(rollout_key_R[rollout_M[drawn]], slot_M[drawn])
    number_M[drawn] = below(word, count_M[drawn])
    copy_M[drawn] = 1 + _occurrence(rollout_M[drawn] * d + number_M[drawn])

    overfull = np.flatnonzero(count_R > d)
    if overfull.size:
        number_M[count_M > d] = _kept(count_R[overfull], rollout_key_R[overfull], d)

    filled_M = number_M >= 0
    member_M = np.full(len(rollout_M), -1, dtype=np.int64)
    member_M[filled_M] = by_rollout_N[(first_R[rollout_M] + number_M)[filled_M]]
    return Alignment(rollout_M, slot_M, member_M, copy_M, filled_M.astype(np.float64))


def _rows(row_count_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rollout and position in it, for `row_count_R[k]` rows of each rollout k."""
    rollout_M = np.repeat(np.arange(len(row_count_R), dtype=np.int64), row_count_R)
    first_R = np.cumsum(row_count_R) - row_count_R
    return rollout_M, np.arange(len(rollout_M), dtype=np.int64) - first_R[rollout_M]


def _kept(count_R: np.ndarray, rollout_key_R: np.ndarray, d: int) -> np.ndarray:
    """Numbers of the d members with the smallest words, ascending, for each rollout in turn; shape [R * d].

    `mix` is a bijection of the counter, so words of one rollout never tie.
    """
    rollout, number = _rows(count_R)
    by_word = np.lexsort((mix(rollout_key_R[rollout], number), rollout))
    smallest = number[by_word[number < d]]  # sorted by rollout, so `number` is also the rank within it
    return np.sort(smallest.reshape(len(count_R), d), axis=1).ravel()


def _occurrence(value_M: np.ndarray) -> np.ndarray:
    """How many earlier rows hold the same value, int64 [M]."""
    order = np.argsort(value_M, kind="stable")
    ranked = value_M[order]
    new_run = np.ones(len(ranked), dtype=bool)
    new_run[1:] = ranked[1:] != ranked[:-1]
    position = np.arange(len(ranked), dtype=np.int64)
    run_start = np.maximum.accumulate(np.where(new_run, position, 0))
    occurrence_M = np.empty_like(position)
    occurrence_M[order] = position - run_start
    return occurrence_M
