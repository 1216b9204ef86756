"""Public bug reports on advantages, as cases."""

import math

import numpy as np
import pytest

from mgrpo_core.credit.advantages import group_relative_advantages, grouped_advantages
from mgrpo_core.credit.alignment import align, member_weight, rollout_keys

NORMALIZATIONS = ("population", "sample", "center", "leave_one_out", "batch_std")


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("value", "size"), [(0.35, 7), (0.7, 8), (0.6, 9), (0.3, 10), (0.1, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_0(normalization, value, size, dtype):  # case A1
    found = grouped_advantages(
        np.full(size, value, dtype=dtype), np.zeros(size, dtype=int), normalization=normalization, eps=1e-8
    )
    assert (found.advantage_N == 0.0).all()
    assert (found.std_G.tolist(), found.batch_std) == ([0.0], 0.0)
    assert found.zero_variance_G.tolist() == [True]
    assert not found.included_N.any()


def test_equal_rewards_with_unequal_weights_give_exactly_0():  # case A1
    found = grouped_advantages(np.full(3, 0.35), np.zeros(3, dtype=int), np.array([0.75, 1.5, 3.0]), eps=0)
    assert (found.advantage_N == 0.0).all()
    assert found.std_G.tolist() == [0.0]


def test_one_odd_reward_among_equals_stays_in_bounds():  # case A2
    # float32 0.3 x 7 and 1.0: sample std gives -0.35355 and 2.47486; times sqrt(8 / 7) = 1.069045 for population
    rewards = np.array([0.3] * 7 + [1.0], dtype=np.float32)
    np.testing.assert_allclose(
        group_relative_advantages(rewards, normalization="sample"), [-0.35355] * 7 + [2.47486], atol=1e-4
    )
    np.testing.assert_allclose(group_relative_advantages(rewards), [-0.37796] * 7 + [2.64574], atol=1e-4)
    # seven equal rewards are the others of the odd one: 1 - 0.3; their residue must not be amplified
    assert group_relative_advantages(rewards, normalization="leave_one_out")[7] == pytest.approx(0.7, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_statistics_are_not_computed_in_the_dtype_of_transport(dtype):  # case A4
    # sample -0.49994 x 3, 1.49981; times sqrt(4 / 3) for population
    rewards = np.array([2, 2, 2, 2.015625], dtype=dtype)
    np.testing.assert_allclose(
        group_relative_advantages(rewards, normalization="sample"), [-0.49994] * 3 + [1.49981], atol=1e-4
    )
    np.testing.assert_allclose(
        group_relative_advantages(rewards), np.array([-0.49994] * 3 + [1.49981]) * math.sqrt(4 / 3), atol=2e-4
    )


def test_a_mean_between_two_halves_is_not_rounded():  # case A4
    # float16 steps by 2**-9 at 2: the mean 2 + 2**-11 does not exist there. -1/2 x 3, 3/2, whatever the step.
    rewards = np.array([2, 2, 2, 2 + 2**-9], dtype=np.float16)
    found = group_relative_advantages(rewards, normalization="sample", eps=0)
    np.testing.assert_allclose(found, [-0.5, -0.5, -0.5, 1.5], atol=1e-12)


@pytest.mark.parametrize("rewards", [np.array([True, False, True, False]), np.array([1, 0, 1, 0])])
def test_rewards_as_bools_and_ints_are_promoted(rewards):  # case A4, D1
    # sample 0.8660 x sqrt(4 / 3) = 1
    np.testing.assert_allclose(group_relative_advantages(rewards, eps=0), [1, -1, 1, -1], atol=1e-12)


def test_a_missing_reward_is_no_zero():  # case A5
    # over 1, 0, 0.5: mean 0.5, sample std 0.5
    found = grouped_advantages(
        np.array([1.0, 0.0, np.nan, 0.5]),
        np.zeros(4, dtype=int),
        observed_N=np.array([True, True, False, True]),
        normalization="sample",
    )
    np.testing.assert_allclose(found.advantage_N, [1, -1, 0, 0], atol=1e-5)
    assert found.included_N.tolist() == [True, True, False, True]
    assert found.size_G.tolist() == [3]


def test_never_graded_does_not_win():  # case A7
    found = grouped_advantages(
        np.array([-0.5, -0.5, 0.0, -0.1]),
        np.zeros(4, dtype=int),
        observed_N=np.array([True, True, False, True]),
        normalization="sample",
    )
    np.testing.assert_allclose(found.advantage_N, [-0.5773, -0.5773, 0, 1.1547], atol=1e-4)


def test_what_a_missing_row_holds_does_not_matter():  # case A5, A7
    observed = np.array([True, True, False])
    advantages = [
        grouped_advantages(np.array([1.0, 0.2, junk]), np.zeros(3, dtype=int), observed_N=observed).advantage_N.tolist()
        for junk in (0.0, np.nan, np.inf, -1e300)
    ]
    assert advantages[1:] == advantages[:-1]


def test_a_short_group_shifts_no_other():  # case A8
    found = grouped_advantages(np.array([2, 4, 9]), np.array([0, 0, 1]), normalization="sample")
    np.testing.assert_allclose(found.advantage_N, [-0.7071, 0.7071, 0], atol=1e-4)
    assert found.included_N.tolist() == [True, True, False]
    assert found.size_G.tolist() == [2, 1]
    assert not found.zero_variance_G.any()  # a singleton is no zero-variance group


def test_groups_whose_sizes_add_up_are_not_merged():  # case A8
    found = grouped_advantages(np.array([0, 1, 1, 1, 0, 0]), np.array([0, 0, 0, 1, 1, 2]), normalization="sample")
    np.testing.assert_allclose(found.advantage_N, [-1.1547, 0.5773, 0.5773, 0.7071, -0.7071, 0], atol=1e-4)


def test_rows_of_groups_may_alternate():  # case A9
    found = grouped_advantages(
        np.array([1, 0.2, 0, 0.2, 1, 0.8, 0, 0.8]), np.array(["a", "b"] * 4), normalization="sample"
    )
    expected = [0.8660, -0.8660, -0.8660, -0.8660, 0.8660, 0.8660, -0.8660, 0.8660]
    np.testing.assert_allclose(found.advantage_N, expected, atol=1e-4)
    assert found.group_G.tolist() == ["a", "b"]


def test_each_group_has_its_own_mean_and_std():  # case A12
    rewards, groups = np.array([0.1, 0.3, 0.5, 0.9]), np.array([0, 0, 1, 1])
    found = grouped_advantages(rewards, groups, normalization="sample").advantage_N
    np.testing.assert_allclose(found, [-0.7071, 0.7071, -0.7071, 0.7071], atol=1e-4)
    centred = grouped_advantages(rewards, groups, normalization="center").advantage_N
    np.testing.assert_allclose(centred, [-0.1, 0.1, -0.2, 0.2], atol=1e-12)


def test_shape_filler_stays_out_of_the_statistics():  # case D2
    found = grouped_advantages(
        np.array([0.2, 0.9, 0.0, 0.0]), np.zeros(4, dtype=int), np.array([1, 1, 0, 0]), normalization="sample"
    )
    np.testing.assert_allclose(found.advantage_N, [-0.7071, 0.7071, 0, 0], atol=1e-4)
    assert found.size_G.tolist() == [2]


def test_duplicates_count_in_the_statistics_over_aligned_rows():  # case D3 (b), population std over aligned rows
    key_R = rollout_keys(0, 0, "sub", ["q"] * 3, range(3))
    weight_N = member_weight(align(np.array([0, 1, 1]), key_R, 2), 3)  # A one call, B two, C none
    found = grouped_advantages(np.array([1, 0, 0]), np.zeros(3, dtype=int), weight_N)
    np.testing.assert_allclose(found.advantage_N, [1, -1, -1], atol=1e-5)


def test_infrastructure_failure_is_missing_data():  # case D6
    found = grouped_advantages(
        np.array([1, 1, 0, 0]),
        np.zeros(4, dtype=int),
        observed_N=np.array([True, True, False, True]),
        normalization="sample",
    )
    np.testing.assert_allclose(found.advantage_N, [0.5773, 0.5773, 0, -1.1547], atol=1e-4)
