"""What holds for every group of rewards."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_core.credit.advantages import group_relative_advantages, grouped_advantages
from tests.oracles import advantages_of_group, batch_std_of

NORMALIZATIONS = ("population", "sample", "center", "leave_one_out", "batch_std")

# Rewards as they occur (few levels) and any number of ordinary size.
reward = st.one_of(st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.0]), st.floats(-1e6, 1e6))
weight = st.sampled_from([0.25, 0.75, 1.0, 1.5, 3.0])
batch = st.lists(st.tuples(st.integers(0, 4), reward, weight), min_size=1, max_size=30)


def columns(rows):
    group, rewards, weights = zip(*rows, strict=True)
    return np.array(rewards), np.array(group), np.array(weights)


@settings(max_examples=300, deadline=None)
@given(batch, st.sampled_from(NORMALIZATIONS), st.sampled_from([1e-6, 1e-3]))
def test_grouped_advantages_equal_a_loop_over_groups(rows, normalization, eps):
    reward_N, group_N, weight_N = columns(rows)
    found = grouped_advantages(reward_N, group_N, weight_N, normalization=normalization, eps=eps)
    by_group = {g: np.flatnonzero(group_N == g) for g in set(group_N.tolist())}
    groups = [(reward_N[index].tolist(), weight_N[index].tolist()) for index in by_group.values()]
    batch_std = batch_std_of(groups)
    assert found.batch_std == pytest.approx(batch_std, rel=1e-6, abs=1e-9)
    for index, (rewards, weights) in zip(by_group.values(), groups, strict=True):
        expected = [0.0] if len(rewards) == 1 else advantages_of_group(rewards, weights, normalization, eps, batch_std)
        np.testing.assert_allclose(found.advantage_N[index], expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(batch, st.randoms(use_true_random=False), st.sampled_from(NORMALIZATIONS))
def test_a_permutation_of_the_rows_permutes_the_result_bit_for_bit(rows, random, normalization):  # case A9
    order = list(range(len(rows)))
    random.shuffle(order)
    reward_N, group_N, weight_N = columns(rows)
    straight = grouped_advantages(reward_N, group_N, weight_N, normalization=normalization)
    shuffled = grouped_advantages(reward_N[order], group_N[order], weight_N[order], normalization=normalization)
    assert straight.advantage_N[order].tolist() == shuffled.advantage_N.tolist()
    assert straight.included_N[order].tolist() == shuffled.included_N.tolist()
    assert straight.mean_G.tolist() == shuffled.mean_G.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(reward, min_size=1, max_size=12))
def test_population_advantages_sum_to_0_and_their_squares_to_n(rewards):
    found = group_relative_advantages(np.array(rewards), eps=0)
    assert found.sum() == pytest.approx(0, abs=1e-6)
    expected = 0 if max(rewards) == min(rewards) else len(rewards)
    assert (found**2).sum() == pytest.approx(expected, rel=1e-6, abs=0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(reward, st.floats(-1e-300, 1e-300), st.floats(0.3, 0.3000000000000004)), min_size=2, max_size=9)
)
def test_no_advantage_exceeds_its_bound(rewards):  # case A2: ddof 0 sqrt(n-1), ddof 1 (n-1)/sqrt(n)
    n = len(rewards)
    for dtype in (np.float64, np.float32):
        array = np.array(rewards, dtype=dtype)
        assert abs(group_relative_advantages(array, eps=0)).max() <= math.sqrt(n - 1) * (1 + 1e-9)
        assert abs(group_relative_advantages(array, normalization="sample", eps=0)).max() <= (n - 1) / math.sqrt(n) * (
            1 + 1e-9
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(reward, weight), min_size=2, max_size=9))
def test_a_weighted_advantage_stays_in_its_bound(rows):
    rewards, weights = (np.array(column) for column in zip(*rows, strict=True))
    bound = np.sqrt((weights.sum() - weights) / weights)
    assert (abs(group_relative_advantages(rewards, weights, eps=0)) <= bound * (1 + 1e-9)).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 64), min_size=2, max_size=9), st.integers(-1024, 1024), st.sampled_from(NORMALIZATIONS))
def test_a_shift_of_a_groups_rewards_changes_nothing(sixteenths, shift, normalization):  # case A12
    rewards = np.array(sixteenths) / 16
    before = group_relative_advantages(rewards, normalization=normalization)
    after = group_relative_advantages(rewards + shift, normalization=normalization)
    np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(reward, min_size=2, max_size=9), st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_a_positive_scale_changes_nothing_without_eps(rewards, scale):
    before = group_relative_advantages(np.array(rewards), eps=0)
    np.testing.assert_allclose(group_relative_advantages(np.array(rewards) * scale, eps=0), before, rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(reward, st.integers(1, 4)), min_size=2, max_size=6),
    st.sampled_from(("population", "sample", "center", "batch_std")),
)
def test_a_multiplicity_counts_like_literal_copies(rows, normalization):  # case D3
    rewards, copies = zip(*rows, strict=True)
    weighted = group_relative_advantages(np.array(rewards), np.array(copies), normalization=normalization)
    literal = group_relative_advantages(np.repeat(rewards, copies), normalization=normalization)
    np.testing.assert_allclose(np.repeat(weighted, copies), literal, rtol=1e-6, atol=1e-6)


def test_tiny_differences_are_not_lost_to_underflow():
    # squares of 1e-200 underflow to 0; the advantage is still +-1
    np.testing.assert_allclose(group_relative_advantages(np.array([1e-200, 3e-200]), eps=0), [-1, 1], rtol=1e-12)
    # the smallest difference that exists; half of it does not
    np.testing.assert_allclose(group_relative_advantages(np.array([0.0, 5e-324]), eps=0), [-1, 1], rtol=1e-12)


def test_an_eps_that_dwarfs_the_differences_gives_0_and_no_warning():
    assert group_relative_advantages(np.array([0.0, 5e-324]), eps=1.0).tolist() == [0.0, 0.0]


def test_neighbouring_floats_keep_the_bound():
    # The mean of 1 and the next float rounds to 1: uncorrected, the advantages would be 0 and sqrt(2).
    found = group_relative_advantages(np.array([1.0, np.nextafter(1.0, 2.0)]), eps=0)
    np.testing.assert_allclose(found, [-1, 1], rtol=1e-12)


def test_sample_std_of_total_weight_1_is_undefined_and_not_included():
    found = grouped_advantages(
        np.array([1.0, 0.0, 0.5]), np.zeros(3, dtype=int), np.full(3, 1 / 3), normalization="sample"
    )
    assert found.advantage_N.tolist() == [0, 0, 0]
    assert not found.included_N.any()


def test_no_row_gives_no_group():  # case D1
    found = grouped_advantages(np.zeros(0), np.zeros(0, dtype=int))
    assert (len(found.advantage_N), len(found.group_G), found.batch_std) == (0, 0, 0.0)


def test_a_group_without_an_observed_reward_has_size_0_and_no_mean():
    found = grouped_advantages(np.array([np.nan, 1, 0]), np.array([7, 8, 8]), observed_N=np.array([False, True, True]))
    assert found.group_G.tolist() == [7, 8]
    assert found.size_G.tolist() == [0, 2]
    assert np.isnan(found.mean_G[0])
    assert found.advantage_N[0] == 0
