"""The overview's charts in Plotly's form: gaps are gaps."""

from infra.tracking.charts import charts
from infra.ui.panels import figure
from tests.infra.ui.spoken_run import metrics_of


def test_a_value_that_is_missing_is_no_point():
    rows = [{"iteration": float(number), **metrics_of(number)} for number in range(3)]
    del rows[1]["success"]
    success = figure(charts(rows)[0], rows)
    assert success["data"][0]["x"] == [0, 2]
    assert success["data"][0]["y"] == [0, 0.2]
