import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.tracking.summary import (
    MOST_ROWS,
    IterationSummary,
    PolicyChange,
    concerns,
    console_line,
    markdown_summary,
    table_rows,
)

METRICS = {
    "success": 0.3125,
    "main/reward": 0.28812,
    "main/trajectories": 128.0,
    "searcher/reward": 0.41,
    "searcher/expert": 0.5,
    "searcher/invocations_mean": 1.94,
    "update/main/grad_norm": 0.523,
    "update/sub/grad_norm": 1.0,
    "update/main/lr": 3e-4,
}
SUMMARY = IterationSummary(
    run="quickstart",
    iteration=7,
    seconds=6.08,
    main_agent="main",
    sub_agents=("searcher",),
    metrics=METRICS,
    changes={"main": PolicyChange(7, 8, "ab" * 32), "sub": PolicyChange(7, 8, "cd" * 32)},
    provenance={"store": "mgrpo-store/quickstart"},
)


def with_metrics(**changes: float) -> IterationSummary:
    return replace(SUMMARY, metrics=METRICS | {name.replace("__", "/"): value for name, value in changes.items()})


def test_the_line_has_the_numbers_that_matter() -> None:
    assert console_line(SUMMARY) == (
        "quickstart-0007  6.1 s  success 0.312  main reward 0.288  searcher reward 0.410, calls 1.9"
        "  grad main 0.52  grad sub 1.00"
    )


def test_the_line_keeps_its_columns_when_a_number_is_missing() -> None:
    line = console_line(replace(SUMMARY, metrics={}))
    assert line == (
        "quickstart-0007  6.1 s  success –  main reward –  searcher reward –, calls –  grad main –  grad sub –"
    )


def test_a_plain_agent_without_sub_agents_has_a_line_too() -> None:
    assert "calls" not in console_line(replace(SUMMARY, sub_agents=()))


def test_nothing_odd_is_no_concern() -> None:
    assert concerns(SUMMARY) == ()


@pytest.mark.parametrize(
    ("metric", "fine", "odd", "words"),
    [
        ("main__infra_failed", 0, 3, "main: 3 trajectories lost to infrastructure"),
        ("searcher__zero_variance_groups", 0.89, 0.9, "searcher: 90% of groups without variance"),
        ("searcher__rollouts_beyond_d", 0.05, 0.06, "searcher: 6% of rollouts delegate more than d times"),
        ("searcher__rollouts_without", 0.89, 1.0, "searcher: 100% of rollouts never delegate"),
    ],
)
def test_what_needs_attention_is_said_in_words(metric: str, fine: float, odd: float, words: str) -> None:
    assert concerns(with_metrics(**{metric: fine})) == ()
    assert concerns(with_metrics(**{metric: odd})) == (words,)
    assert console_line(with_metrics(**{metric: odd})).endswith(f"  ! {words}")
    assert f"**{words}**" in markdown_summary(with_metrics(**{metric: odd}))


def test_a_policy_that_took_no_step_is_a_concern() -> None:
    still = replace(SUMMARY, changes={"main": PolicyChange(7, 8, "ab"), "sub": PolicyChange(7, 7, "cd")})
    assert concerns(still) == ("policy sub took no step",)


def test_what_is_not_finite_is_named_and_stays_visible() -> None:  # case G6
    broken = with_metrics(success=math.nan, main__reward=math.inf)
    assert concerns(broken) == ("not finite: main/reward, success",)
    assert "success nan  main reward inf" in console_line(broken)


def test_many_that_are_not_finite_are_counted() -> None:
    broken = with_metrics(**{f"main__m{index}": math.nan for index in range(5)})
    assert concerns(broken) == ("not finite: main/m0, main/m1, main/m2 and 2 more",)


def test_the_page_has_a_table_of_agents_and_one_of_policies() -> None:
    page = markdown_summary(SUMMARY)
    assert "# quickstart, iteration 7" in page
    assert "| agent | trajectories | reward | expert | invocations mean |" in page
    assert "| main | 128 | 0.2881 | – | – |" in page
    assert "| searcher | – | 0.41 | 0.5 | 1.94 |" in page
    assert "| policy | version | grad norm | lr |" in page
    assert "| main | 7 → 8 | 0.523 | 0.0003 |" in page
    assert "- store: `mgrpo-store/quickstart`" in page
    assert f"- policy sub: `{'cd' * 6}`" in page


@given(st.text() | st.text("|`\\\n *_"))
def test_no_name_can_break_the_page(text: str) -> None:
    page = markdown_summary(replace(SUMMARY, run=text, sub_agents=(text,), provenance={text: text}))
    plain = markdown_summary(SUMMARY)
    assert len(page.split("\n")) == len(plain.split("\n"))
    tables = [line for line in page.split("\n") if line.startswith("|")]
    bars = [line.count("|") for line in tables[:4]]
    assert len(set(bars)) == 1


@given(st.dictionaries(st.text(min_size=1), st.floats()))
def test_table_rows_are_valid_json_whatever_was_measured(metrics: dict[str, float]) -> None:
    rows = table_rows(metrics)
    json.dumps(rows, allow_nan=False)
    assert [row["metric"] for row in rows] == sorted(metrics)


def test_a_small_learning_rate_is_not_rounded_to_nothing() -> None:
    assert table_rows({"update/main/lr": 1.23456789e-7}) == [{"metric": "update/main/lr", "value": 1.23457e-7}]


def test_a_table_is_cut_where_the_interface_would_choke_and_says_so() -> None:
    assert len(table_rows({f"m{index:04d}": 0.0 for index in range(MOST_ROWS)})) == MOST_ROWS
    rows = table_rows({f"m{index:04d}": 0.0 for index in range(MOST_ROWS + 50)})
    assert len(rows) == MOST_ROWS
    # 250 numbers, 199 shown
    assert str(rows[-1]["metric"]).startswith("and 51 more")
