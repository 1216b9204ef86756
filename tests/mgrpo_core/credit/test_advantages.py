import pickle

import numpy as np
import pytest

from mgrpo_core.credit.advantages import group_relative_advantages, grouped_advantages
from mgrpo_core.credit.alignment import align, member_weight, rollout_keys
from mgrpo_core.errors import ConfigError, NonFiniteError, ShapeError


def test_main_agent_fixture_with_population_std():
    # mean 0.3; squares 0.49 + 0.04 + 0.04 + 0.09 = 0.66, / 4 = 0.165, std 0.406202
    # 0.7 / 0.406202 = 1.7233, -0.2 / 0.406202 = -0.4924, -0.3 / 0.406202 = -0.7385
    found = grouped_advantages(np.array([1.0, 0.1, 0.1, 0.0]), np.zeros(4, dtype=int), eps=0)
    assert found.mean_G == pytest.approx([0.3], abs=1e-12)
    assert found.std_G == pytest.approx([0.406202], abs=1e-6)
    np.testing.assert_allclose(found.advantage_N, [1.7233, -0.4924, -0.4924, -0.7385], atol=5e-5)


def test_main_agent_fixture_with_sample_std():
    # 0.66 / 3 = 0.22, std 0.469042; 0.7 / 0.469042 = 1.4924
    found = group_relative_advantages(np.array([1.0, 0.1, 0.1, 0.0]), normalization="sample")
    np.testing.assert_allclose(found, [1.4924, -0.4264, -0.4264, -0.6396], atol=5e-5)


# Sub-agent fixture: K = 3, d = 3, weights (0.1, 0.4, 0.5) of format, main-correct, expert.
SUB_REWARDS = np.array([0.9, 0.1, 0.6, 0.6, 0.35, 0.35, 0.0])  # one of k1, two of k2, four of k3
SUB_ROLLOUTS = np.array([0, 1, 1, 2, 2, 2, 2])
ALIGNED_ADVANTAGES = [1.1631] * 3 + [-1.8278] + [0.0415] * 3 + [-0.8931] * 2


def test_sub_agent_fixture_over_aligned_rows():
    # The draw k1 -> [1, 1, 1], k2 -> [1, 2, 2], k3 -> [1, 2, 3]: mean 5.3 / 9 = 0.588889, std 0.267476
    found = grouped_advantages(SUB_REWARDS[[0, 0, 0, 1, 2, 2, 3, 4, 5]], np.zeros(9, dtype=int), eps=0)
    assert found.mean_G == pytest.approx([0.588889], abs=1e-6)
    assert found.std_G == pytest.approx([0.267476], abs=1e-6)
    np.testing.assert_allclose(found.advantage_N, ALIGNED_ADVANTAGES, atol=5e-5)


def test_sub_agent_fixture_over_distinct_trajectories_with_their_multiplicities():
    # The same draw as weights: 3 copies of k1's, 1 and 2 of k2's, 1, 1, 1 and 0 of k3's
    found = grouped_advantages(SUB_REWARDS, np.zeros(7, dtype=int), np.array([3, 1, 2, 1, 1, 1, 0]), eps=0)
    assert found.mean_G == pytest.approx([0.588889], abs=1e-6)
    np.testing.assert_allclose(found.advantage_N, [1.1631, -1.8278, 0.0415, 0.0415, -0.8931, -0.8931, 0], atol=5e-5)
    assert found.included_N.tolist() == [True] * 6 + [False]
    assert (found.size_G.tolist(), found.weight_G.tolist()) == ([6], [9.0])


def test_sub_agent_fixture_with_deterministic_weights():
    key_R = rollout_keys(0, 0, "sub", ["q"] * 3, range(3))
    weight_N = member_weight(align(SUB_ROLLOUTS, key_R, 3, "weighted"), 7)
    assert weight_N.tolist() == [3, 1.5, 1.5, 0.75, 0.75, 0.75, 0.75]
    # mean (2.7 + 1.05 + 0.75 * 1.3) / 9 = 0.525, std 0.326280
    found = grouped_advantages(SUB_REWARDS, np.zeros(7, dtype=int), weight_N, eps=0)
    assert found.mean_G == pytest.approx([0.525], abs=1e-12)
    assert found.std_G == pytest.approx([0.326280], abs=1e-6)
    np.testing.assert_allclose(
        found.advantage_N, [1.1493, -1.3026, 0.2299, 0.2299, -0.5363, -0.5363, -1.6090], atol=5e-5
    )
    assert (weight_N * found.advantage_N).sum() == pytest.approx(0, abs=1e-12)


def test_flat_pooling_has_another_baseline():
    # 2.9 / 7
    found = grouped_advantages(SUB_REWARDS, np.zeros(7, dtype=int))
    assert found.mean_G == pytest.approx([0.414286], abs=1e-6)


def test_leave_one_out_by_hand():
    # 1 - (0.1 + 0.1 + 0) / 3 = 0.933333; 0.1 - 1.1 / 3 = -0.266667; 0 - 1.2 / 3 = -0.4
    found = group_relative_advantages(np.array([1.0, 0.1, 0.1, 0.0]), normalization="leave_one_out")
    np.testing.assert_allclose(found, [0.933333, -0.266667, -0.266667, -0.4], atol=1e-6)


def test_leave_one_out_leaves_out_every_copy():
    # weights 3, 1: 1 - 0 = 1 and 0 - 1 = -1; a copy of 1 in its own baseline would give 1 - 2/3 = 0.333
    found = group_relative_advantages(np.array([1.0, 0.0]), np.array([3.0, 1.0]), normalization="leave_one_out")
    np.testing.assert_allclose(found, [1, -1], atol=1e-12)


def test_batch_std_by_hand():
    # centred -0.1, 0.1, -0.2, 0.2: squares 0.1 / 4 = 0.025, std 0.158114; the singleton does not dilute it
    found = grouped_advantages(
        np.array([0.1, 0.3, 0.5, 0.9, 7.0]), np.array([0, 0, 1, 1, 2]), normalization="batch_std", eps=0
    )
    assert found.batch_std == pytest.approx(0.158114, abs=1e-6)
    np.testing.assert_allclose(found.advantage_N, [-0.632456, 0.632456, -1.264911, 1.264911, 0], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_observed_reward_that_is_no_number_is_refused(bad):  # case A5
    with pytest.raises(NonFiniteError, match="reward of row 1 \\(group 3\\)") as caught:
        grouped_advantages(np.array([1.0, bad]), np.array([3, 3]))
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NonFiniteError)


def test_none_among_rewards_is_refused_with_the_way_out():  # case A5
    with pytest.raises(ShapeError, match="observed_N False"):
        grouped_advantages(np.array([1.0, None]), np.zeros(2, dtype=int))


def test_rewards_as_text_are_refused():  # case A5
    with pytest.raises(ShapeError, match="expected numbers"):
        grouped_advantages(np.array(["1.0", "0"]), np.zeros(2, dtype=int))


def test_columns_of_different_length_are_refused():  # case A14
    with pytest.raises(ShapeError, match=r"group_N \(3,\)"):
        grouped_advantages(np.zeros(2), np.zeros(3, dtype=int))


def test_a_negative_weight_is_refused():
    with pytest.raises(ShapeError, match="weight of row 1 is -1"):
        grouped_advantages(np.zeros(2), np.zeros(2, dtype=int), np.array([1, -1]))


def test_rewards_that_overflow_are_refused():
    with pytest.raises(NonFiniteError):
        group_relative_advantages(np.array([1e308, 1e308, -1e308]))


def test_an_empty_group_is_refused():
    with pytest.raises(ShapeError):
        group_relative_advantages(np.zeros(0))


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ConfigError, match="expected one of population"):
        group_relative_advantages(np.zeros(2), normalization="std")  # pyright: ignore[reportArgumentType]


def test_a_negative_eps_is_refused():
    with pytest.raises(ConfigError, match="eps is -1"):
        group_relative_advantages(np.zeros(2), eps=-1)
