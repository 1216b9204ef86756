"""A chart of the overview in Plotly's form."""

from typing import Any

from infra.traces.visible import visible
from infra.tracking.charts import ITERATION, Chart, Rows

_GREY, _GRID = "#808893", "rgba(128,136,147,0.2)"
_TICKS = 8
_MARKED_TO = 40  # points, up to which each is marked


def figure(chart: Chart, rows: Rows) -> dict[str, Any]:
    """The chart; values that are missing are gaps."""
    mode = "lines+markers" if len(rows) <= _MARKED_TO else "lines"
    data: list[dict[str, Any]] = []
    for line in chart.lines:
        there = [(row[ITERATION], row[line.metric]) for row in rows if ITERATION in row and line.metric in row]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": mode,
            "name": visible(line.label).replace("<", "&lt;"),  # Plotly knows some markup in names
            "x": [at for at, _ in there],
            "y": [float(f"{value:.6g}") for _, value in there],
            "line": {"color": line.colour, "dash": line.dash, "width": 2 if line.dash == "solid" else 1.5},
            "marker": {"size": 5},
        }
        if chart.kind == "stacked":
            trace |= {"stackgroup": "one", "mode": "lines", "line": {"color": line.colour, "width": 0.5}}
        data.append(trace)
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    value_axis: dict[str, Any] = {**axis, "rangemode": "tozero"}
    if chart.kind in ("share", "success"):
        value_axis |= {"tickformat": ".3~p"}
    if chart.kind == "log":
        value_axis |= {"type": "log", "exponentformat": "power"}
    legend: dict[str, Any] = {"orientation": "h", "y": -0.14, "yanchor": "top", "x": 0, "font": {"size": 10.5}}
    if chart.kind == "stacked":
        legend = {"font": {"size": 10.5}}
    numbers = {row[ITERATION] for row in rows if ITERATION in row}
    return {
        "data": data,
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": _GREY, "size": 11, "family": "system-ui, sans-serif"},
            "margin": {"l": 44, "r": 10, "t": 6, "b": 26 if chart.kind == "stacked" else 64},
            "height": 260,
            "xaxis": {**axis, "rangemode": "nonnegative", "tickformat": ",d", "nticks": 8}
            | ({"dtick": 1} if max(numbers, default=0) < _TICKS else {}),
            "yaxis": value_axis,
            "showlegend": len(data) > 1,
            "legend": legend,
            "hovermode": "x unified",
            "hoverlabel": {"namelength": -1},
            "uirevision": chart.title,
        },
    }
