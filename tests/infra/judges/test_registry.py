import asyncio
import sys

import pytest

from infra.judges.registry import build_judge
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.rule_judge import SupportJudge
from mgrpo_core.rollout.protocols import Judge, Report


def factory_of_a_judge() -> SupportJudge:
    return SupportJudge(max_words=3)


def factory_of_something_else() -> int:
    return 1


def test_the_fact_judge_knows_the_facts_that_search_finds() -> None:
    judge = build_judge("facts:geo_facts")
    assert isinstance(judge, Judge)
    assert asyncio.run(judge.score(Report("country with capital Lima", "Peru", (), ()))) == 1.0


def test_support_is_the_general_judge() -> None:
    assert isinstance(build_judge("support"), SupportJudge)


def test_an_import_path_names_a_users_own_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    assert build_judge("users_own:factory_of_a_judge").version == "support-1/3"
    with pytest.raises(ConfigError, match="the factory returned int"):
        build_judge("users_own:factory_of_something_else")


@pytest.mark.parametrize("spec", ["facts:wikipedia", "expert", ""])
def test_an_unknown_judge_is_refused_with_what_there_is(spec: str) -> None:
    with pytest.raises(ConfigError, match="facts:geo_facts, support"):
        build_judge(spec)
