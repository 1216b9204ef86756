"""The overview: how the run's numbers went, iteration by iteration."""

from collections.abc import Mapping
from typing import Any

import dash_ag_grid as dag
from dash import Dash, Input, Output, dcc, html

from infra.traces.visible import visible
from infra.tracking.charts import (
    HELD_OUT,
    HELD_OUT_HIGH,
    HELD_OUT_LOW,
    ITERATION,
    SECONDS,
    SUCCESS,
    Chart,
    agents_in,
    charts,
    policies_in,
)
from infra.ui.addresses import IterationPage
from infra.ui.notices import notice, or_notice
from infra.ui.panels import figure
from infra.ui.run_reader import RunReader
from infra.ui.words import NONE, counted, number, share

_MOST_FAULTS = 5


def layout() -> html.Main:
    """The page, without its numbers: they come when it is there."""
    return html.Main([html.Div("Reading the iterations…", className="waiting")], id="overview")


def register(app: Dash, reader: RunReader) -> None:
    """Fill the page once it is there."""

    @app.callback(Output("overview", "children"), Input("overview", "id"))
    def fill(_id: str) -> Any:
        return or_notice(lambda: _content(reader))


def _content(reader: RunReader) -> list[Any]:
    rows, faults = reader.figures()
    if not rows and not faults:
        return [
            notice(
                "No iteration is committed yet",
                f"Run {reader.run.name!r} has none in {reader.run.files.url}. An iteration shows here once it is "
                "committed; reload the page then. `mgrpo train` starts or continues the run.",
            )
        ]
    wrong = [notice("Some iterations cannot be shown", "\n".join(_first(faults)), wrong=True)] if faults else []
    measured = [row for row in rows if _is_of_an_iteration(row)]
    if not measured:
        return wrong
    return [
        *wrong,
        _headline(rows, measured),
        _table(measured),
        html.Section([_figure(chart, rows) for chart in charts(rows)], className="charts"),
    ]


def _first(faults: list[str]) -> list[str]:
    rest = len(faults) - _MOST_FAULTS
    return faults[:_MOST_FAULTS] + (
        [f"and {rest} more. Run `mgrpo verify`, which names every fault."] if rest > 0 else []
    )


def _is_of_an_iteration(row: Mapping[str, float]) -> bool:
    """Held-out success after the last iteration stands in a row of its own."""
    return any(name != ITERATION and not name.startswith("held_out/") for name in row)


def _headline(rows: list[dict[str, float]], measured: list[dict[str, float]]) -> html.Section:
    """The newest numbers, large."""
    newest = measured[-1]
    held_out = [row for row in rows if HELD_OUT in row]
    tiles = [
        ("Iterations", f"{len(measured):,}", ""),
        ("Success, training", share(newest.get(SUCCESS)), f"iteration {int(newest[ITERATION])}"),
    ]
    if held_out:
        last = held_out[-1]
        bounds = f"{share(last.get(HELD_OUT_LOW))} to {share(last.get(HELD_OUT_HIGH))}"
        tiles.append(("Success, held out", share(last[HELD_OUT]), f"after {int(last[ITERATION])}; 95 %: {bounds}"))
    tiles += [
        (f"Reward of {visible(agent)}", number(newest[f"{agent}/reward"]), f"iteration {int(newest[ITERATION])}")
        for agent in agents_in(newest)
    ]
    return html.Section(
        [
            html.Div(
                [html.Div(name, className="tile-name"), html.Div(value, className="tile-value"), html.Small(note)],
                className="tile",
            )
            for name, value, note in tiles
        ],
        className="tiles",
    )


def _figure(chart: Chart, rows: list[dict[str, float]]) -> html.Figure:
    graph = dcc.Graph(
        figure=figure(chart, rows), config={"displayModeBar": False}, responsive=True, style={"height": "260px"}
    )
    caption = html.Figcaption([html.H3(chart.title), html.P(chart.explanation)])
    return html.Figure([caption, graph], className="wide" if chart.kind == "stacked" else "")


def _table(rows: list[dict[str, float]]) -> html.Section:
    """One line an iteration, newest first."""
    columns = _columns(rows)
    data = [
        {"iteration": int(row[ITERATION]), "href": IterationPage(int(row[ITERATION])).path}
        | {f"column{place}": words(row) for place, (_, words) in enumerate(columns.values())}
        for row in reversed(rows)
    ]
    definitions = [
        {"field": "iteration", "headerName": "iteration", "cellRenderer": "PageLink", "width": 110, "pinned": "left"},
        *(
            {"field": f"column{place}", "headerName": visible(name), "type": "rightAligned"}
            for place, (name, _) in enumerate(columns.values())
        ),
    ]
    grid = dag.AgGrid(
        id="iterations",
        columnDefs=definitions,
        rowData=data,
        defaultColDef={
            "sortable": False,
            "resizable": True,
            "minWidth": 90,
            "flex": 1,
            "wrapHeaderText": True,
            "autoHeaderHeight": True,
        },
        dashGridOptions={"rowHeight": 32, "suppressCellFocus": True, "ensureDomOrder": True},
        className="grid",
        style={"height": f"{min(len(data), 8) * 32 + 70}px"},
    )
    return html.Section([html.H2(counted(len(data), "iteration", "iterations")), grid], className="table")


def _columns(rows: list[dict[str, float]]) -> dict[str, tuple[str, Any]]:
    """Header and words of each metric that the table has."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def of(metric: str, say: Any) -> Any:
        return lambda row: say(row[metric]) if metric in row else NONE

    wanted: list[tuple[str, str, Any]] = [(SUCCESS, "success", share), (HELD_OUT, "held out", share)]
    for agent in agents_in(names):
        wanted += [
            (f"{agent}/reward", f"{agent}: reward", number),
            (f"{agent}/zero_variance_groups", f"{agent}: no variance", share),
            (f"{agent}/invocations_mean", f"{agent}: calls", number),
        ]
    for policy in policies_in(names):
        wanted += [
            (f"update/{policy}/grad_norm", f"{policy}: gradient", number),
            (f"update/{policy}/mismatch_max", f"{policy}: mismatch, most", number),
        ]
    return {metric: (name, of(metric, say)) for metric, name, say in wanted if metric in names} | {
        "seconds": ("seconds, rollout and update", _seconds)
    }


def _seconds(row: Mapping[str, float]) -> str:
    """Main rollouts and update: other stages run beside them or take no time to speak of."""
    parts = [row[name] for name in (f"{SECONDS}main_rollout", f"{SECONDS}update_policy") if name in row]
    return number(sum(parts)) if parts else NONE
