import asyncio

import pytest

from infra.datasets.geo_facts import Fact, facts
from infra.judges.facts import SUPPORTED, FactJudge
from mgrpo_core.rollout.protocols import Report

_FACTS = (
    Fact("currency of Peru", ("Sol",)),
    Fact("language of Peru", ("Spanish", "Quechua")),
    Fact("country with capital Lima", ("Peru",)),
)
_SEEN = ("- currency of Peru: Sol\n- language of Peru: Spanish",)


def _score(task: str, reply: str | None, seen: tuple[str, ...] = _SEEN) -> float:
    return asyncio.run(FactJudge(_FACTS).score(Report(task, reply, (), seen)))


def test_the_fact_that_was_asked_for_scores_one() -> None:
    assert _score("currency of Peru", "Sol") == 1.0


def test_every_accepted_value_scores_one() -> None:
    assert _score("language of Peru", "Quechua") == 1.0


def test_task_and_reply_are_compared_as_answers_are() -> None:
    assert _score(" Currency of the PERU?", "the sol.") == 1.0


@pytest.mark.parametrize("reply", ["Spanish", "Peru", "unknown", "Sol and Dollar", "", "the"])
def test_any_other_reply_to_an_answerable_task_scores_zero(reply: str) -> None:
    assert _score("currency of Peru", reply) == 0.0


def test_no_reply_scores_zero() -> None:
    assert _score("currency of Peru", None) == 0.0


def test_the_context_of_a_delegation_is_no_part_of_the_task() -> None:
    assert _score("currency of Peru\n\nThe user is in Lima.", "Sol") == 1.0


def test_a_task_without_an_answer_pays_a_little_for_reporting_what_a_search_brought() -> None:
    assert _score("currency of Lima", "Sol") == SUPPORTED


@pytest.mark.parametrize(("reply", "seen"), [("Sol", ()), ("Dollar", _SEEN), ("", _SEEN), ("currency of Peru", _SEEN)])
def test_such_a_task_pays_nothing_for_what_was_not_seen(reply: str, seen: tuple[str, ...]) -> None:
    assert _score("currency of Lima", reply, seen) == 0.0


def test_partial_credit_is_less_than_the_fact_is_worth() -> None:
    assert 0.0 < SUPPORTED < 0.5


def test_every_fact_of_the_corpus_is_paid_and_only_for_its_own_value() -> None:
    judge = FactJudge(facts())

    async def scores() -> list[tuple[float, float]]:
        made = []
        for fact in facts():
            right = await judge.score(Report(fact.key, fact.value, (), ()))
            made.append((right, await judge.score(Report(fact.key, f"{fact.value} too", (), ()))))
        return made

    assert set(asyncio.run(scores())) == {(1.0, 0.0)}


def test_the_judge_never_sees_an_answer_of_the_query_and_says_which_version_it_is() -> None:
    assert not {"answers", "query"} & set(Report.__slots__)
    assert FactJudge(_FACTS).version.startswith("facts-")
