import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.errors import ConfigError, JudgeError
from mgrpo_core.rewards.component import ScoreStatus, absent, scored
from mgrpo_core.rewards.judging import judge_trajectories, report_of
from mgrpo_core.rewards.rule_judge import SupportJudge, support
from mgrpo_core.rollout.protocols import Judge, Report
from mgrpo_core.trajectories import Message, Status


class Fixed:
    """A judge that returns or raises one thing."""

    version = "fixed-1"

    def __init__(self, verdict):
        self.verdict = verdict
        self.at_work = self.most = 0

    async def score(self, report):
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await asyncio.sleep(0.001)
        self.at_work -= 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


def subs(make_trajectory, count=1, **settings):
    return [make_trajectory(path=(("main", 0), ("sub", index)), **settings) for index in range(count)]


async def verdict(make_trajectory, returned):
    (sub,) = subs(make_trajectory)
    return (await judge_trajectories([sub], Fixed(returned)))[sub.trajectory_id]


async def test_a_score_is_a_component(make_trajectory):
    assert await verdict(make_trajectory, 0.75) == scored(0.75)
    assert await verdict(make_trajectory, None) == absent("judge fixed-1 returned None")


@pytest.mark.parametrize("returned", [JudgeError("429"), TimeoutError("slow"), float("nan"), 1.5])
async def test_a_judge_that_cannot_score_has_failed(make_trajectory, returned):
    # case A5
    component = await verdict(make_trajectory, returned)
    assert (component.status, component.value) == (ScoreStatus.FAILED, None)
    assert component.reason.startswith("judge fixed-1")


async def test_a_judge_that_hangs_fails_at_its_deadline(make_trajectory):
    class Hangs(Fixed):
        async def score(self, report):
            await asyncio.sleep(30)

    (sub,) = subs(make_trajectory)
    judged = await judge_trajectories([sub], Hangs(1), deadline_s=0.01)
    assert judged[sub.trajectory_id].reason == "judge fixed-1: no score within 0.01 s"


async def test_a_judge_that_returns_text_is_broken(make_trajectory):
    with pytest.raises(ConfigError, match="judge fixed-1: returned 'good'"):
        await verdict(make_trajectory, "good")


async def test_a_failed_trajectory_is_not_judged_and_a_limit_holds(make_trajectory):
    rows = subs(make_trajectory, 6)
    rows[2] = dataclasses.replace(rows[2], status=Status.INFRA_FAILED, failure="down")
    judge = Fixed(1)
    assert isinstance(judge, Judge)
    judged = await judge_trajectories(rows, judge, concurrency=2)
    assert judged.keys() == {row.trajectory_id for index, row in enumerate(rows) if index != 2}
    assert judge.most == 2


def test_a_report_holds_what_the_sub_agent_saw_and_no_reference_answer(make_trajectory):
    (sub,) = subs(make_trajectory)
    messages = (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a"),
        Message("tool", "seen", "search"),
    )
    report = report_of(dataclasses.replace(sub, messages=messages))
    assert report == Report("?", "Lima", sub.turns, ("seen",))


@pytest.mark.parametrize(
    ("reply", "observations", "score"),
    [
        ("Lima", ["The capital of Peru is Lima."], 1.0),
        ("It is Lima, founded 1535", ["Lima!"], 1 / 3),  # content words lima, founded, 1535; one was seen
        ("Lima", [], 0.0),
        ("Lima", [""], 0.0),
        (None, ["Lima"], 0.0),
        ("of the", ["of the"], 0.0),  # no content
        ("lima " * 8, ["lima"], 0.5),  # support 1, four words allowed of eight
    ],
)
def test_support_is_the_share_of_content_that_was_seen(reply, observations, score):
    assert support(reply, observations, max_words=4 if reply and len(reply) > 30 else 64) == pytest.approx(
        score, abs=1e-12
    )


@given(st.text(max_size=60), st.lists(st.text(max_size=30), max_size=3))
def test_support_is_in_the_unit_interval_and_more_observations_never_lower_it(reply, observations):
    before = support(reply, observations, max_words=5)
    assert 0 <= before <= 1
    assert support(reply, [*observations, "another"], max_words=5) >= before


async def test_the_support_judge_names_its_version_and_its_rule():
    judge = SupportJudge(max_words=10)
    assert isinstance(judge, Judge)
    assert judge.version == "support-1/10"
    assert await judge.score(Report("?", "Lima", (), ("Lima",))) == 1.0
