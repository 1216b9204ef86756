"""Every figure that people look for has its line in a chart."""

import math

import pytest

from infra.tracking.charts import agents_in, charts, policies_in
from tests.infra.ui.spoken_run import metrics_of


@pytest.fixture
def rows() -> list[dict[str, float]]:
    return [{"iteration": float(number), **metrics_of(number)} for number in range(3)]


def test_every_agent_and_policy_has_its_lines(rows):
    metrics = {line.metric for chart in charts(rows) for line in chart.lines}
    assert metrics >= {
        "success", "main/reward", "searcher/reward", "searcher/invocations_mean", "main/zero_variance_groups",
        "main/sampled_tokens_mean", "update/sub/approx_kl", "update/main/mismatch_max", "seconds/update_policy",
    }  # fmt: skip


def test_a_chart_without_a_number_is_left_out(rows):
    bare = [{"iteration": row["iteration"], "success": row["success"]} for row in rows]
    assert [chart.title for chart in charts(bare)] == ["Success"]
    assert charts([]) == []


def test_a_reference_that_there_is_not_draws_no_line(rows):
    for row in rows:
        row["update/main/ref_kl"] = 0.0
    assert "update/main/ref_kl" not in {line.metric for chart in charts(rows) for line in chart.lines}
    rows[1]["update/main/ref_kl"] = 0.2
    assert "update/main/ref_kl" in {line.metric for chart in charts(rows) for line in chart.lines}


def test_names_with_slashes_are_agents_and_policies_too():
    names = [
        "sub/search/reward",
        "main/reward",
        "update/sub/search/loss",
        "update/main/loss",
        "update/main/lr",
        "success",
    ]
    assert agents_in(names) == ["sub/search", "main"]
    assert policies_in(names) == ["sub/search", "main"]


def test_a_line_of_nan_and_infinity_only_is_left_out():
    rows = [{"iteration": 0.0, "success": math.nan}, {"iteration": 1.0, "success": math.inf, "seconds/commit": 0.1}]
    assert [chart.title for chart in charts(rows)] == ["Seconds of each stage"]
