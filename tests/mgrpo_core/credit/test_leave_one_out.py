"""Credit without one invocation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_core.credit.advantages import grouped_advantages
from mgrpo_core.credit.alignment import align, member_weight, rollout_keys
from mgrpo_core.credit.leave_one_out import Credit, CreditRules, LeaveOneOut, LeftOut, credit_change
from mgrpo_core.errors import ShapeError
from tests.oracles import left_out_by_loop

MODES = ("random", "weighted", "none")
NORMALIZATIONS = ("population", "sample", "center", "leave_one_out", "batch_std")

# algorithm.md §1.4: three rollouts of one query, 1, 2 and 4 invocations
REWARDS = np.array([0.9, 0.1, 0.6, 0.6, 0.35, 0.35, 0.0])
ROLLOUTS = np.array([0, 1, 1, 2, 2, 2, 2])


def keys(count: int, seed: int = 0) -> np.ndarray:
    return rollout_keys(seed, 0, "searcher", ["q"] * count, range(count))


def fixture(**rules) -> LeaveOneOut:
    return LeaveOneOut(REWARDS, np.zeros(7, dtype=np.int64), ROLLOUTS, keys(3), CreditRules(**rules))


def test_the_others_share_the_rollouts_slots_and_a_new_mean():
    found = fixture(d=3, alignment="weighted", normalization="center").without([1])
    assert found.others_N.tolist() == [0, 2, 3, 4, 5, 6]
    # the second rollout's 3 slots now are all those of its other invocation: weight 1.5 -> 3
    assert found.before.weight_N.tolist() == [3, 1.5, 0.75, 0.75, 0.75, 0.75]
    assert found.after.weight_N.tolist() == [3, 3, 0.75, 0.75, 0.75, 0.75]
    # mean (3 x 0.9 + 1.5 x 0.7 + 0.75 x 1.3) / 9 = 0.525 -> (3 x 0.9 + 3 x 0.6 + 0.75 x 1.3) / 9 = 0.608333
    assert found.before.advantage_N == pytest.approx(REWARDS[found.others_N] - 0.525, abs=1e-12)
    assert found.after.advantage_N == pytest.approx(REWARDS[found.others_N] - 0.608333333, abs=1e-9)
    change = credit_change([found])
    assert change.others == 6
    assert change.mean_change == pytest.approx(0.083333333, abs=1e-9)
    assert change.largest_change == pytest.approx(-0.083333333, abs=1e-9)
    assert change.sign_changes == 2  # 0.6: 0.075 above the mean, then 0.008333 below it, in two trajectories
    # w A: 3 x 0.0833 for the first, 0.225 - 0.1125 of the sibling, 0.75 x 0.0833 four times
    sibling = abs(3 * (0.6 - 0.608333333) - 1.5 * 0.075)
    assert change.mean_pull_change == pytest.approx((3 * 0.083333333 + sibling + 4 * 0.75 * 0.083333333) / 6, abs=1e-9)


def test_a_rollout_without_its_only_invocation_is_in_no_group():
    found = fixture(d=3, alignment="weighted", normalization="center").without([0])
    # (1.5 x 0.7 + 0.75 x 1.3) / 6 = 0.3375
    assert found.after.advantage_N == pytest.approx(REWARDS[1:] - 0.3375, abs=1e-12)


def test_a_dropped_one_takes_the_place_that_becomes_free():
    whole = fixture(d=3, alignment="random", normalization="center")
    (dropped,) = np.flatnonzero(whole.credit.weight_N == 0)
    first = next(row for row in (3, 4, 5, 6) if row != dropped)
    found = whole.without([first])
    place = found.others_N.tolist().index(dropped)
    assert (found.before.advantage_N[place], found.before.weight_N[place]) == (0, 0)
    assert found.after.weight_N[place] == 1


def test_of_two_in_a_group_the_other_is_left_without_signal():
    two = LeaveOneOut(np.array([0.0, 1.0]), np.zeros(2), np.array([0, 1]), keys(2), CreditRules(d=1, eps=0))
    found = two.without([0])
    assert (found.before.advantage_N.tolist(), found.after.advantage_N.tolist()) == ([1.0], [0.0])
    change = credit_change([found])
    assert (change.others, change.lost, change.gained, change.largest_change) == (1, 1, 0, -1.0)


def test_without_others_nothing_changes():
    alone = LeaveOneOut(np.array([1.0]), np.zeros(1), np.array([0]), keys(1), CreditRules(d=2))
    assert credit_change([alone.without([0])]).others == 0
    assert credit_change([]).mean_change == 0


@pytest.mark.parametrize("rows", [[0, 1], []])
def test_what_is_left_out_is_of_one_rollout(rows):
    with pytest.raises(ShapeError, match="expected those of one"):
        fixture(d=2).without(rows)
    assert fixture(d=2).without_each([]) == []


reward = st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.0])
# (rollout, reward) a row; two rollouts make a group
invocations = st.lists(st.tuples(st.integers(0, 5), reward), min_size=1, max_size=20)
rules_of = st.builds(
    CreditRules,
    d=st.integers(1, 4),
    alignment=st.sampled_from(MODES),
    normalization=st.sampled_from(NORMALIZATIONS),
    eps=st.sampled_from([1e-6, 1e-3]),
)


def batch(rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rollout_N = np.array([rollout for rollout, _ in rows])
    return np.array([one for _, one in rows]), rollout_N // 2, rollout_N


@settings(max_examples=200, deadline=None)
@given(invocations, rules_of, st.data())
def test_it_is_what_a_loop_over_everything_gives_without_the_row(rows, rules, data):
    reward_N, group_N, rollout_N = batch(rows)
    gone = data.draw(st.integers(0, len(rows) - 1))
    found = LeaveOneOut(reward_N, group_N, rollout_N, keys(6), rules).without([gone])
    weights, advantages = left_out_by_loop(
        reward_N.tolist(), group_N.tolist(), rollout_N.tolist(), keys(6).tolist(), gone,
        d=rules.d, mode=rules.alignment, normalization=rules.normalization, eps=rules.eps,
    )  # fmt: skip
    assert found.others_N.tolist() == [row for row in range(len(rows)) if group_N[row] == group_N[gone] and row != gone]
    assert found.after.weight_N.tolist() == [weights[row] for row in found.others_N]
    np.testing.assert_allclose(
        found.after.advantage_N, [advantages[row] for row in found.others_N], rtol=1e-6, atol=1e-6
    )


@settings(max_examples=100, deadline=None)
@given(invocations, rules_of, st.data())
def test_cases_do_not_know_of_each_other(rows, rules, data):
    reward_N, group_N, rollout_N = batch(rows)
    every = LeaveOneOut(reward_N, group_N, rollout_N, keys(6), rules)
    cases = data.draw(st.lists(st.integers(0, len(rows) - 1).map(lambda row: [row]), max_size=6))
    whole = data.draw(st.integers(0, len(rows) - 1))
    cases.append(np.flatnonzero(rollout_N == rollout_N[whole]).tolist())
    for case, found in zip(cases, every.without_each(cases), strict=True):
        alone = every.without(case)
        for part in ("others_N", "before", "after"):
            one, other = getattr(found, part), getattr(alone, part)
            fields = [(one, other)] if part == "others_N" else zip(columns_of(one), columns_of(other), strict=True)
            assert all(a.tolist() == b.tolist() for a, b in fields)


def columns_of(credit: Credit) -> tuple[np.ndarray, ...]:
    return credit.weight_N, credit.advantage_N, credit.included_N


@settings(max_examples=100, deadline=None)
@given(invocations, rules_of)
def test_with_everybody_there_it_is_the_runs_own_credit(rows, rules):
    reward_N, group_N, rollout_N = batch(rows)
    found = LeaveOneOut(reward_N, group_N, rollout_N, keys(6), rules).credit
    weight_N = member_weight(align(rollout_N, keys(6), rules.d, rules.alignment), len(rows))
    theirs = grouped_advantages(reward_N, group_N, weight_N, normalization=rules.normalization, eps=rules.eps)
    assert found.weight_N.tolist() == weight_N.tolist()
    assert found.advantage_N.tolist() == theirs.advantage_N.tolist()
    assert found.included_N.tolist() == theirs.included_N.tolist()


@settings(max_examples=100, deadline=None)
@given(invocations, st.integers(1, 4), st.sampled_from(("population", "center")), st.data())
def test_a_twin_takes_over_and_nobody_notices(rows, d, normalization, data):
    """Weighted, a rollout has mass d however often it delegated: one of two with equal rewards can go."""
    rollout, reward = data.draw(st.sampled_from(rows))
    twin = [one for one in rows if one[0] != rollout] + [(rollout, reward)] * 2
    reward_N, group_N, rollout_N = batch(twin)
    rules = CreditRules(d, "weighted", normalization)
    found = LeaveOneOut(reward_N, group_N, rollout_N, keys(6), rules).without([len(twin) - 1])
    assert credit_change([found]).mean_change == pytest.approx(0, abs=1e-9)


def test_parts_of_several_agents_are_summed_up():
    one = fixture(d=3, alignment="weighted", normalization="center").without([1])
    both = credit_change([one, LeftOut(one.others_N, one.before, one.before)])
    assert both.others == 12
    assert both.mean_change == pytest.approx(0.083333333 / 2, abs=1e-9)
    assert both.sign_changes == 2
