import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.errors import ConfigError, ShapeError
from mgrpo_core.evaluation import Scores, paired_difference, success_rate
from mgrpo_core.student_t import two_sided_quantile

score_lists = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6)
score_tables = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), score_lists, min_size=1, max_size=12)


def named(scores_QS: np.ndarray) -> Scores:
    return {f"q{index}": [float(score) for score in row] for index, row in enumerate(scores_QS)}


def test_rate_and_standard_error_by_hand() -> None:
    result = success_rate({"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1, 0]})
    # question means 1, .5, 0, .5: mean .5, variance (ddof 1) (.25 + 0 + .25 + 0) / 3 = 1/6, error sqrt(1/6 / 4)
    assert result.rate == 0.5
    assert result.standard_error == pytest.approx(math.sqrt(1 / 24))
    assert (result.questions, result.samples, result.questions_without_score) == (4, 8, 0)


def test_interval_is_wilsons_at_the_effective_number_of_samples() -> None:
    result = success_rate({"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1, 0]})
    # n = p (1 - p) / se^2 = .25 * 24 = 6, between Q = 4 and 8 samples. Wilson at p = .5: half a width
    # sqrt(k / 4 + k^2 / 4) / (1 + k) = sqrt(k / (1 + k)) / 2, k = t^2 / n, t of 3 degrees = 3.182446
    k = 3.182446**2 / 6
    half = math.sqrt(k / (1 + k)) / 2
    assert (result.low, result.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_copies_of_a_sample_add_no_certainty() -> None:
    once = success_rate({"a": [1], "b": [0], "c": [1], "d": [0], "e": [0]})
    copied = success_rate({"a": [1] * 50, "b": [0] * 50, "c": [1] * 50, "d": [0] * 50, "e": [0] * 50})
    assert (copied.rate, copied.low, copied.high) == (once.rate, once.low, once.high)


def test_samples_that_spread_alike_in_every_question_count_each() -> None:
    result = success_rate({question: [1, 0, 0, 0] for question in "abcdef"})
    # no spread over questions: n = 24 samples, k = t^2 / 24 with t of 5 degrees = 2.570582
    k = 2.570582**2 / 24
    half = math.sqrt(k * 0.25 * 0.75 + k * k / 4) / (1 + k)
    assert (result.low, result.high) == pytest.approx(
        ((0.25 + k / 2) / (1 + k) - half, (0.25 + k / 2) / (1 + k) + half), abs=1e-6
    )


def half_width(rate: float, count: int, t: float) -> float:
    k = t**2 / count
    return math.sqrt(k * rate * (1 - rate) + k * k / 4) / (1 + k)


def test_one_sample_a_question_is_wilsons_interval_of_so_many_questions() -> None:
    result = success_rate({"a": [1], "b": [0], "c": [0], "d": [0], "e": [0]})
    # p = .2, variance (ddof 1) .2: p (1 - p) / se^2 = .16 / (.2 / 5) = 4, lifted to 5; t of 4 degrees = 2.776445
    assert (result.high - result.low) / 2 == pytest.approx(half_width(0.2, 5, 2.776445), abs=1e-6)


def test_less_spread_than_chance_counts_no_sample_twice() -> None:
    scores = {question: [1, 0, 0, 0] for question in "abcd"} | {"e": [1, 1, 0, 0], "f": [0, 0, 0, 0]}
    result = success_rate(scores)
    # p = .25, variance 2 * .25^2 / 5 = .025: p (1 - p) / se^2 = .1875 / (.025 / 6) = 45, but there are 24 samples
    assert (result.high - result.low) / 2 == pytest.approx(half_width(0.25, 24, 2.570582), abs=1e-6)


@pytest.mark.parametrize("always", [0.0, 1.0])
def test_a_rate_of_zero_or_one_has_an_interval_with_a_width(always: float) -> None:
    result = success_rate({question: [always] * 4 for question in "abcdefghij"})
    # Wilson at n = Q = 10, t of 9 degrees = 2.262157: k / (1 + k) = .338
    k = 2.262157**2 / 10
    assert result.high - result.low == pytest.approx(k / (1 + k), abs=1e-6)
    assert result.rate in (result.low, result.high)


def test_a_question_counts_once_however_many_samples_were_graded() -> None:
    assert success_rate({"a": [1] * 8, "b": [0]}).rate == 0.5


def test_a_question_without_a_graded_sample_is_left_out_and_counted() -> None:
    result = success_rate({"a": [1, 0], "b": []})
    assert (result.rate, result.questions, result.questions_without_score) == (0.5, 1, 1)


def test_one_question_says_nothing_about_others() -> None:
    result = success_rate({"a": [1, 0, 1]})
    assert (result.standard_error, result.low, result.high) == (None, 0.0, 1.0)


@given(score_tables)
def test_the_interval_holds_the_rate_and_stays_between_zero_and_one(scores: Scores) -> None:
    result = success_rate(scores)
    assert 0 <= result.low <= result.rate <= result.high <= 1


@given(score_tables)
def test_right_for_wrong_mirrors_the_interval(scores: Scores) -> None:
    result = success_rate(scores)
    mirrored = success_rate({question: [1 - value for value in values] for question, values in scores.items()})
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - result.high, 1 - result.low), abs=1e-12)


@given(score_tables)
def test_more_confidence_is_a_wider_interval(scores: Scores) -> None:
    sure, surer = success_rate(scores, confidence=0.8), success_rate(scores, confidence=0.99)
    assert surer.low <= sure.low <= sure.high <= surer.high


@given(score_tables)
def test_the_order_of_questions_does_not_matter(scores: Scores) -> None:
    turned = dict(reversed(list(scores.items())))
    assert astuple(success_rate(turned)) == pytest.approx(astuple(success_rate(scores)), abs=1e-12)


def test_difference_by_hand() -> None:
    before = {"a": [0, 0], "b": [1, 0], "c": [0, 0], "d": [1, 1]}
    after = {"d": [1, 1], "c": [1, 0], "b": [1, 1], "a": [0, 1]}
    result = paired_difference(before, after)
    # means .0 .5 .0 1. and .5 1. .5 1.: differences .5 .5 .5 0, mean .375, variance (3 * .125^2 + .375^2) / 3 = .0625
    assert result.difference == 0.375
    assert result.standard_error == pytest.approx(0.25 / 2)
    assert (result.questions, result.questions_left_out) == (4, 0)


def test_difference_interval_combines_the_two_rates_own_intervals() -> None:
    before, after = {"a": [0], "b": [0], "c": [1], "d": [0]}, {"a": [1], "b": [0], "c": [1], "d": [1]}
    first, second = success_rate(before), success_rate(after)
    result = paired_difference(before, after)
    # deviations -1/4 -1/4 3/4 -1/4 and 1/4 -3/4 1/4 1/4: products sum to -1/16 + 3/16 + 3/16 - 1/16 = 1/4,
    # squares to 3/4 each: phi = (1/4) / (3/4) = 1/3
    below, above = second.rate - second.low, first.high - first.rate
    assert result.low == pytest.approx(0.5 - math.sqrt(below**2 - 2 / 3 * below * above + above**2))
    below, above = first.rate - first.low, second.high - second.rate
    assert result.high == pytest.approx(0.5 + math.sqrt(below**2 - 2 / 3 * below * above + above**2))


def test_hard_questions_that_stay_hard_make_the_difference_surer() -> None:
    before = {"a": [1, 0], "b": [1, 1], "c": [0, 0], "d": [0, 0], "e": [1, 1], "f": [0, 1]}
    same_order = {"a": [1, 1], "b": [1, 1], "c": [0, 0], "d": [0, 1], "e": [1, 1], "f": [1, 1]}
    other_order = dict(zip("abcdef", [same_order[question] for question in "cdabef"], strict=True))
    paired, unpaired = paired_difference(before, same_order), paired_difference(before, other_order)
    assert paired.difference == pytest.approx(unpaired.difference)
    assert paired.high - paired.low < 0.8 * (unpaired.high - unpaired.low)


def test_two_evaluations_that_never_succeed_do_not_prove_that_nothing_changed() -> None:
    nothing = {question: [0, 0] for question in "abcdefghij"}
    result = paired_difference(nothing, nothing)
    # Each rate is in [0, k / (1 + k)] with k = 2.262157^2 / 10: so is the difference, either way
    k = 2.262157**2 / 10
    assert (result.low, result.high) == pytest.approx((-k / (1 + k), k / (1 + k)), abs=1e-6)
    assert not result.beyond_chance


def test_a_change_of_every_question_is_beyond_chance() -> None:
    result = paired_difference({q: [0, 0] for q in "abcdefgh"}, {q: [1, 1] for q in "abcdefgh"})
    assert result.difference == 1
    assert result.low > 0
    assert result.beyond_chance


def test_questions_of_one_evaluation_only_are_left_out_and_counted() -> None:
    result = paired_difference({"a": [1], "b": [0], "c": []}, {"a": [1], "b": [1], "d": [0]})
    assert (result.questions, result.questions_left_out, result.difference) == (2, 2, 0.5)


@given(score_tables, st.randoms(use_true_random=False))
def test_swapping_the_evaluations_mirrors_the_difference(before: Scores, random: "np.random.Generator") -> None:
    after = {question: [float(random.random() < 0.5) for _ in values] for question, values in before.items()}
    forward, back = paired_difference(before, after), paired_difference(after, before)
    assert (back.difference, back.low, back.high) == pytest.approx(
        (-forward.difference, -forward.high, -forward.low), abs=1e-12
    )
    assert -1 - 1e-12 <= forward.low <= forward.difference <= forward.high <= 1 + 1e-12


# Each simulated truth: questions, samples a question, rate, how alike questions are (large: alike), least coverage.
# 400 draws: the standard error of a coverage of 0.95 is 0.011, so 0.92 is 2.8 of them below.
TRUTHS = [(120, 4, 0.3, 0.5, 0.92), (30, 4, 0.5, 2.0, 0.92), (30, 4, 0.02, 2.0, 0.92), (10, 1, 0.1, 1.0, 0.92)]


@pytest.mark.parametrize(("questions", "samples", "rate", "alike", "least"), TRUTHS)
def test_intervals_hold_the_truth_as_often_as_they_say(
    questions: int, samples: int, rate: float, alike: float, least: float
) -> None:
    rng = np.random.default_rng(5)
    gain = 0.1 * (1 - rate)
    held = held_difference = held_naive = 0
    draws = 400
    z = two_sided_quantile(0.95, 10**9)
    for _ in range(draws):
        chance_Q = rng.beta(rate * alike, (1 - rate) * alike, questions)
        before = rng.binomial(1, chance_Q, (samples, questions)).T
        after = rng.binomial(1, chance_Q + 0.1 * (1 - chance_Q), (samples, questions)).T
        result = success_rate(named(before))
        held += result.low <= rate <= result.high
        difference = paired_difference(named(before), named(after))
        held_difference += difference.low <= gain <= difference.high
        naive = math.sqrt(result.rate * (1 - result.rate) / before.size)
        held_naive += abs(result.rate - rate) <= z * naive
    assert held / draws >= least
    assert held_difference / draws >= 0.92
    # The usual interval, which counts samples as independent, does not.
    assert held_naive / draws < 0.93


@pytest.mark.parametrize("score", [-0.1, 1.5, math.nan, math.inf])
def test_a_score_that_is_no_share_is_refused_by_question(score: float) -> None:
    with pytest.raises(ConfigError, match=r"question 'b' has score .*expected a number in \[0, 1\]"):
        success_rate({"a": [1], "b": [score]})


def test_no_score_at_all_is_refused() -> None:
    with pytest.raises(ShapeError, match="none of 2 questions has a score"):
        success_rate({"a": [], "b": []})


def test_evaluations_of_other_questions_cannot_be_compared() -> None:
    with pytest.raises(ShapeError, match="same questions"):
        paired_difference({"a": [1]}, {"b": [1]})


def test_a_confidence_in_percent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"as in 0\.95"):
        success_rate({"a": [1], "b": [0]}, confidence=95)
