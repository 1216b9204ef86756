import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_core.credit.alignment import align, alignment_counts, member_weight, rollout_keys
from mgrpo_core.errors import ConfigError, ShapeError
from tests.oracles import AlignedRow, align_by_loop

MODES = ("random", "weighted", "none")


def keys(count: int, seed: int = 0) -> np.ndarray:
    return rollout_keys(seed, 0, "searcher", ["q"] * count, range(count))


def rows(alignment) -> list[AlignedRow]:
    columns = (alignment.rollout_M, alignment.slot_M, alignment.member_M, alignment.copy_M, alignment.weight_M)
    return [AlignedRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


# Counts a rollout, and the order in which trajectories of several rollouts are interleaved.
interleaved = st.lists(st.integers(0, 5), max_size=24).flatmap(
    lambda rollouts: st.tuples(st.just(rollouts), st.integers(max(rollouts, default=-1) + 1, 7))
)


@settings(max_examples=200, deadline=None)
@given(interleaved, st.integers(1, 6), st.sampled_from(MODES), st.integers(0, 2**32))
def test_alignment_equals_a_loop_over_rollouts_and_slots(case, d, mode, seed):
    rollout_of, rollouts = case
    key_R = keys(rollouts, seed)
    alignment = align(np.array(rollout_of, dtype=np.int64), key_R, d, mode)
    assert rows(alignment) == align_by_loop(rollout_of, key_R.tolist(), d, mode)


@settings(max_examples=100, deadline=None)
@given(interleaved, st.integers(1, 6))
def test_random_fills_exactly_d_slots_of_every_rollout(case, d):
    rollout_of, rollouts = case
    alignment = align(np.array(rollout_of, dtype=np.int64), keys(rollouts), d)
    assert alignment.rollout_M.tolist() == [k for k in range(rollouts) for _ in range(d)]
    assert alignment.slot_M.tolist() == list(range(d)) * rollouts


@settings(max_examples=100, deadline=None)
@given(interleaved, st.integers(1, 6))
def test_nothing_is_dropped_while_a_slot_is_free(case, d):
    rollout_of, rollouts = case
    rollout_N = np.array(rollout_of, dtype=np.int64)
    weight_N = member_weight(align(rollout_N, keys(rollouts), d), len(rollout_of))
    d_k_N = np.bincount(rollout_N, minlength=rollouts)[rollout_N] if rollout_of else np.zeros(0)
    assert (weight_N[d_k_N <= d] >= 1).all()
    assert (weight_N[d_k_N > d] <= 1).all()  # a full rollout copies nothing


@settings(max_examples=100, deadline=None)
@given(interleaved, st.integers(1, 6), st.sampled_from(("random", "weighted")))
def test_every_rollout_with_a_call_has_mass_d(case, d, mode):
    rollout_of, rollouts = case
    alignment = align(np.array(rollout_of, dtype=np.int64), keys(rollouts), d, mode)
    mass_R = np.bincount(alignment.rollout_M, weights=alignment.weight_M, minlength=rollouts)
    has_call_R = np.bincount(np.array(rollout_of, dtype=np.int64), minlength=rollouts) > 0
    np.testing.assert_allclose(mass_R, np.where(has_call_R, d, 0.0), rtol=1e-12)


@pytest.mark.parametrize("d_k", [1, 3, 8, 12])
def test_each_trajectory_is_seen_d_over_d_k_times_on_average(d_k):
    # d = 8: expected 8, 2.67, 1 and 0.67. Means of 20,000 rollouts; a copy count has variance below 8 * 1/3 * 2/3 = 1.8
    # and a mean therefore a deviation below sqrt(1.8 / 20000) = 0.0095; five of them.
    rollouts = 20_000
    weight_N = member_weight(align(np.repeat(np.arange(rollouts), d_k), keys(rollouts), 8), rollouts * d_k)
    by_number = weight_N.reshape(rollouts, d_k).mean(0)
    np.testing.assert_allclose(by_number, 8 / d_k, atol=0.05)


def test_pairs_are_dropped_independently_of_their_place():
    # d = 2 of d_k = 4 leaves 6 pairs, each expected in 1/6 of 12,000 rollouts = 2,000 +- 41; five deviations.
    rollouts = 12_000
    alignment = align(np.repeat(np.arange(rollouts), 4), keys(rollouts), 2)
    pairs = (alignment.member_M % 4).reshape(rollouts, 2)
    counts = np.unique(pairs[:, 0] * 4 + pairs[:, 1], return_counts=True)[1]
    assert len(counts) == 6
    assert abs(counts - 2000).max() < 205


def test_weighted_is_the_expectation_of_random():
    rollout_N = np.array([0, 1, 1, 1, 2, 2, 2, 2, 2])  # d_k = 1, 3, 5
    seeds = 4000
    total_N = np.zeros(9)
    for seed in range(seeds):
        key_R = np.array([seed, seed + 10**6, seed + 2 * 10**6], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        total_N += member_weight(align(rollout_N, key_R, 3), 9)
    # d / d_k = 3, 1, 0.6; deviation of a mean below sqrt(0.24 / 4000) = 0.008
    expected_N = member_weight(align(rollout_N, keys(3), 3, "weighted"), 9)
    np.testing.assert_allclose(expected_N, [3, 1, 1, 1, 0.6, 0.6, 0.6, 0.6, 0.6])
    np.testing.assert_allclose(total_N / seeds, expected_N, atol=0.04)


def test_copies_are_numbered_and_name_their_source():  # case D3
    # A: one call; B: two; C: none; d = 2.
    alignment = align(np.array([0, 1, 1]), keys(3), 2)
    assert alignment.member_M.tolist() == [0, 0, 1, 2, -1, -1]
    assert alignment.copy_M.tolist() == [0, 1, 0, 0, 0, 0]
    assert alignment.weight_M.tolist() == [1, 1, 1, 1, 0, 0]
    assert member_weight(alignment, 3).tolist() == [2, 1, 1]


def test_same_keys_give_the_same_picks_and_other_keys_others():  # case D3
    rollout_N = np.repeat(np.arange(50), 5)
    first = align(rollout_N, keys(50, seed=1), 8)
    again = align(rollout_N, keys(50, seed=1), 8)
    other = align(rollout_N, keys(50, seed=2), 8)
    assert first.member_M.tolist() == again.member_M.tolist()
    assert first.member_M.tolist() != other.member_M.tolist()


def test_picks_of_a_rollout_do_not_depend_on_other_rollouts():
    key_R = keys(3)
    among_others = align(np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2]), key_R, 4)
    alone = align(np.zeros(5, dtype=np.int64), key_R[2:], 4)
    assert (among_others.member_M[8:] - 5).tolist() == alone.member_M.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_no_rollout_gives_empty_arrays(mode):
    alignment = align(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64), 3, mode)
    assert [len(column) for column in (alignment.rollout_M, alignment.member_M, alignment.weight_M)] == [0, 0, 0]
    assert member_weight(alignment, 0).shape == (0,)


def test_no_call_anywhere_leaves_empty_slots_of_weight_0():  # case D1
    alignment = align(np.zeros(0, dtype=np.int64), keys(4), 2)
    assert alignment.member_M.tolist() == [-1] * 8
    assert alignment.weight_M.tolist() == [0.0] * 8


def test_none_takes_each_once_and_fills_nothing_up():
    alignment = align(np.array([1, 1, 2]), keys(3), 2, "none")
    assert rows(alignment) == [AlignedRow(1, 0, 0, 0, 1.0), AlignedRow(1, 1, 1, 0, 1.0), AlignedRow(2, 0, 2, 0, 1.0)]


def test_counts_say_what_was_copied_dropped_and_empty():
    rollout_N = np.array([0, 1, 1, 1, 1])  # d = 3: rollout 0 copies twice, 1 drops one, 2 is empty
    counts = alignment_counts(align(rollout_N, keys(3), 3), rollout_N, 3, 3)
    assert (counts.rollouts, counts.empty_rollouts, counts.overfull_rollouts) == (3, 1, 1)
    assert (counts.copies, counts.dropped) == (2, 1)


def test_keys_depend_on_every_part_and_not_on_the_order():
    base = rollout_keys(0, 1, "searcher", ["q1", "q2"], [0, 1])
    assert base.dtype == np.uint64
    assert rollout_keys(0, 1, "searcher", ["q2", "q1"], [1, 0]).tolist() == base[::-1].tolist()
    for other in (
        rollout_keys(1, 1, "searcher", ["q1"], [0]),
        rollout_keys(0, 2, "searcher", ["q1"], [0]),
        rollout_keys(0, 1, "reader", ["q1"], [0]),
        rollout_keys(0, 1, "searcher", ["q3"], [0]),
        rollout_keys(0, 1, "searcher", ["q1"], [1]),
    ):
        assert other[0] != base[0]


def test_a_rollout_without_a_key_is_refused():
    with pytest.raises(ShapeError, match="trajectory 1 is of rollout 2, but there are 2 keys"):
        align(np.array([0, 2]), keys(2), 3)


def test_keys_of_another_type_are_refused():
    with pytest.raises(ShapeError, match="expected uint64"):
        align(np.array([0]), np.zeros(1, dtype=np.int64), 3)


def test_fewer_than_one_slot_is_refused():
    with pytest.raises(ConfigError, match="d is 0"):
        align(np.array([0]), keys(1), 0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="expected one of random, weighted, none"):
        align(np.array([0]), keys(1), 2, "flat")  # pyright: ignore[reportArgumentType]
