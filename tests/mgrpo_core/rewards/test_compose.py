import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import ScoreStatus, absent, failed, scored
from mgrpo_core.rewards.compose import (
    MainWeights,
    SubWeights,
    main_correct_of,
    main_reward,
    score_rollout,
    sub_reward,
)
from mgrpo_core.rewards.format import format_valid
from mgrpo_core.trajectories import Status, StopReason

SCORED, FAILED, ABSENT = ScoreStatus.SCORED, ScoreStatus.FAILED, ScoreStatus.ABSENT
SUB_PATH = (("main", 0), ("sub", 0))


@pytest.mark.parametrize(
    ("actions", "stop", "valid"),
    [
        (["answer"], StopReason.ANSWER, True),
        (["tool", "delegate", "answer"], StopReason.ANSWER, True),
        (["invalid", "answer"], StopReason.ANSWER, False),
        (["tool"], StopReason.TURN_LIMIT, False),
        (["tool", "invalid"], StopReason.TURN_TOKEN_LIMIT, False),
    ],
)
def test_a_format_is_valid_if_every_turn_is_and_the_last_answers(make_trajectory, actions, stop, valid):
    assert format_valid(make_trajectory(*actions, stop=stop)) is valid


@pytest.mark.parametrize(
    ("actions", "correct", "reward"),
    [
        (["answer"], 1, 1.0),  # 0.1·1 + 0.9·1
        (["answer"], 0, 0.1),  # 0.1·1 + 0.9·0
        (["invalid", "answer"], 1, 0.0),  # invalid: 0, though the answer is right
    ],
)
def test_a_main_agent_is_paid_for_format_and_a_right_answer(make_trajectory, actions, correct, reward):
    row = main_reward(make_trajectory(*actions), scored(correct), MainWeights())
    assert (row.status, row.reason) == (SCORED, None)
    assert row.reward == pytest.approx(reward, abs=1e-12)
    assert row.correct == scored(correct)  # kept, paid or not


def test_sub_agents_rewards_of_the_worked_fixture(make_trajectory):
    # algorithm.md §1.4, (format, main correct, expert), β = (0.1, 0.4, 0.5):
    # k1 (1,1,.8) = .1 + .4 + .4; k2 (1,0,0) = .1, (1,0,1) = .6; k3 (1,0,1) = .6, (1,0,.5) = .35, (0,0,.9) = 0
    rows = [(1, 1, 0.8, 0.9), (1, 0, 0, 0.1), (1, 0, 1, 0.6), (1, 0, 0.5, 0.35), (0, 0, 0.9, 0.0)]
    for valid, main_correct, expert, reward in rows:
        sub = make_trajectory(*(["answer"] if valid else ["invalid", "answer"]), path=SUB_PATH)
        row = sub_reward(sub, scored(main_correct), scored(expert), SubWeights())
        assert row.reward == pytest.approx(reward, abs=1e-12)
        assert (row.format.value, row.main_correct.value, row.expert.value) == (valid, main_correct, expert)


def test_sub_agents_are_paid_for_a_main_answer_that_is_right_and_well_formed(make_trajectory):
    # algorithm.md §6, row 9: binary, not R_M
    assert main_correct_of(make_trajectory("answer"), scored(1)) == scored(1)
    assert main_correct_of(make_trajectory("answer"), scored(0)) == scored(0)
    assert main_correct_of(make_trajectory("invalid", "answer"), scored(1)) == scored(0)


def test_a_judge_that_failed_leaves_no_reward(make_trajectory):
    # case A5: missing is not zero
    row = sub_reward(make_trajectory(path=SUB_PATH), scored(1), failed("judge: 429"), SubWeights())
    assert (row.status, row.reward, row.reason) == (FAILED, None, "expert: judge: 429")
    assert row.main_correct == scored(1)


def test_never_graded_is_neither_zero_nor_failed(make_trajectory, make_rollout):
    # case A7
    rollout = make_rollout(make_trajectory(), make_trajectory(path=SUB_PATH))
    rows = score_rollout(rollout, scored(1), {}, main_weights=MainWeights(), sub_weights={"sub": SubWeights()})
    assert (rows[1].status, rows[1].reward, rows[1].reason) == (ABSENT, None, "expert: never graded")
    assert rows[0].reward == pytest.approx(1.0, abs=1e-12)


def test_a_failed_part_is_told_before_an_absent_one(make_trajectory):
    row = sub_reward(make_trajectory(path=SUB_PATH), absent("none"), failed("down"), SubWeights())
    assert (row.status, row.reason) == (FAILED, "expert: down")


def test_a_part_of_weight_zero_may_be_missing(make_trajectory):
    weights = SubWeights(format=0.2, main_correct=0.8, expert=0.0)
    row = sub_reward(make_trajectory(path=SUB_PATH), scored(1), absent("no judge"), weights)
    assert (row.status, row.reward) == (SCORED, pytest.approx(1.0, abs=1e-12))


def test_an_invalid_format_scores_zero_whatever_else_is_missing(make_trajectory):
    row = sub_reward(make_trajectory("invalid", path=SUB_PATH), failed("x"), failed("judge down"), SubWeights())
    assert (row.status, row.reward, row.expert.status) == (SCORED, 0.0, FAILED)


def test_an_infrastructure_failure_has_no_reward_for_anybody_under_it(make_trajectory, make_rollout):
    # case D6: the main server died after a sub-agent had done its work
    down = {"status": Status.INFRA_FAILED, "stop": StopReason.INFRASTRUCTURE, "reply": None, "failure": "server down"}
    rollout = make_rollout(make_trajectory("delegate", **down), make_trajectory(path=SUB_PATH))
    rows = score_rollout(
        rollout,
        scored(0),
        {rollout.trajectories[1].trajectory_id: scored(1)},
        main_weights=MainWeights(),
        sub_weights={"sub": SubWeights()},
    )
    assert [(row.status, row.reward) for row in rows] == [(FAILED, None)] * 2
    assert rows[0].reason == "server down"
    assert rows[1].reason == "main_correct: server down"
    assert rows[0].format.status is ABSENT


def test_a_budget_used_up_is_the_policys_fault_and_scores_zero(make_trajectory):
    # case D6: a time-out that the policy caused keeps its reward
    main = make_trajectory("tool", stop=StopReason.TURN_LIMIT, status=Status.POLICY_FAILED, reply=None)
    assert (main_reward(main, scored(0), MainWeights()).reward, main.status) == (0.0, Status.POLICY_FAILED)


def test_an_agent_without_weights_is_a_wrong_setting(make_trajectory, make_rollout):
    rollout = make_rollout(make_trajectory(), make_trajectory(path=SUB_PATH))
    with pytest.raises(ConfigError, match=r"agent sub: no reward weights.*Given: other"):
        score_rollout(rollout, scored(1), {}, main_weights=MainWeights(), sub_weights={"other": SubWeights()})


unit = st.floats(0, 1)


@given(valid=st.booleans(), main_correct=unit, expert=unit, weights=st.tuples(unit, unit, unit))
def test_a_sub_reward_is_between_zero_and_the_sum_of_its_weights(make_trajectory, valid, main_correct, expert, weights):
    sub = make_trajectory(*(["answer"] if valid else ["invalid", "answer"]), path=SUB_PATH)
    row = sub_reward(sub, scored(main_correct), scored(expert), SubWeights(*weights))
    assert 0 <= row.reward <= sum(weights) + 1e-12
    if not valid:
        assert row.reward == 0
