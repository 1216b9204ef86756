"""An iteration: its figures, and a table of its trajectories that is filtered and sorted where the data are."""

from typing import Any, cast, get_args

import dash_ag_grid as dag
import numpy as np
import pyarrow as pa
from dash import MATCH, Dash, Input, Output, State, ctx, dcc, html, no_update

from infra.store.stored_iteration import StoredIteration
from infra.traces.filters import Sign
from infra.traces.visible import shortened, visible
from infra.ui.addresses import IterationPage, RolloutPage, Shown, Wanted, page_of, wanted_of
from infra.ui.figures_of_iteration import figures_section
from infra.ui.notices import notice, or_notice
from infra.ui.run_reader import RunReader, Sorting
from infra.ui.words import counted, number, signed
from mgrpo_core.trajectories import Status

ROWS_AT_ONCE = 100
_QUESTION_CHARS = 120
_SIGNS = {"+": "above 0", "-": "below 0", "0": "0"}

# Column of the grid: header, column of the index that it sorts by, width.
_COLUMNS: tuple[tuple[str, str, str | None, int], ...] = (
    ("agent_path", "trajectory", "agent_path", 170),
    ("query", "query", "query_position", 78),
    ("rollout", "rollout", "rollout_index", 84),
    ("question", "question", None, 250),
    ("status", "status", "status", 104),
    ("reward", "reward", "reward", 84),
    ("advantage", "advantage", "advantage", 102),
    ("weight", "weight", "weight", 82),
    ("format", "format", "format", 82),
    ("correct", "correct", "correct", 84),
    ("main_correct", "main correct", "main_correct", 84),
    ("expert", "expert", "expert", 82),
    ("sampled_tokens", "sampled tokens", "sampled_tokens", 92),
    ("stop_reason", "stop", "stop_reason", 110),
    ("why", "why not", None, 220),
)
_NUMBERS = (
    "query",
    "rollout",
    "reward",
    "format",
    "correct",
    "main_correct",
    "expert",
    "advantage",
    "weight",
    "sampled_tokens",
)
_SORTED_BY = {name: column for name, _, column, _ in _COLUMNS if column is not None}
_FORM = ("agent", "status", "sign", "query", "rollout", "low", "high", "text")


def layout(reader: RunReader, page: IterationPage, search: str | None) -> html.Main:
    """The page with its form; figures and table come when it is there."""
    stored = reader.stored(page.iteration)  # or there is no such page
    last = reader.iterations() - 1
    steps = [
        dcc.Link("← before", href=IterationPage(page.iteration - 1).path) if page.iteration else html.Span("← before"),
        dcc.Link("after →", href=IterationPage(page.iteration + 1).path)
        if page.iteration < last
        else html.Span("after →"),
    ]
    return html.Main(
        [
            dcc.Location(id="address", refresh="callback-nav"),  # of this page: others have no filter
            html.Header(
                [html.H1(f"Iteration {page.iteration}"), html.Nav(steps, className="steps")], className="title"
            ),
            html.Section(html.Div("Reading…", className="waiting"), id="iteration-figures"),
            _form(stored, wanted_of(search)),
            html.Section(html.Div("Reading…", className="waiting"), id="trajectories"),
        ]
    )


def register(app: Dash, reader: RunReader) -> None:
    """Figures, form, table and its rows."""

    @app.callback(
        Output("iteration-figures", "children"), Input("iteration-figures", "id"), State("address", "pathname")
    )
    def fill_figures(_id: str, path: str) -> Any:
        page = page_of(path)
        if not isinstance(page, IterationPage):
            return no_update
        return or_notice(lambda: figures_section(reader, reader.stored(page.iteration)))

    @app.callback(
        output={
            "search": Output("address", "search"),
            "form": {name: Output(f"filter-{name}", "value") for name in _FORM},
        },
        inputs={
            "search": Input("address", "search"),
            "form": {name: Input(f"filter-{name}", "value") for name in _FORM},
        },
        prevent_initial_call=True,
    )
    def keep_together(search: str, form: dict[str, Any]) -> Any:
        """Form and address say the same; whichever changed last is right."""
        if ctx.triggered_id == "address":
            told = wanted_of(search)
            return {"search": no_update, "form": {name: getattr(told, name) or None for name in _FORM}}
        typed = Wanted(**{name: "" if value is None else str(value) for name, value in form.items()})
        same = typed == wanted_of(search)
        return {"search": no_update if same else typed.search, "form": dict.fromkeys(_FORM, no_update)}

    @app.callback(Output("trajectories", "children"), Input("address", "search"), State("address", "pathname"))
    def fill_table(search: str, path: str) -> Any:
        page = page_of(path)
        if not isinstance(page, IterationPage):
            return no_update
        return or_notice(lambda: _table(reader, page, wanted_of(search)))

    @app.callback(
        Output({"part": "rows", "of": MATCH}, "getRowsResponse"),
        Output({"part": "count", "of": MATCH}, "children"),
        Input({"part": "rows", "of": MATCH}, "getRowsRequest"),
        State("address", "pathname"),
        prevent_initial_call=True,
    )
    def fill_rows(request: dict[str, Any] | None, path: str) -> Any:
        page = page_of(path)
        if request is None or not isinstance(page, IterationPage):
            return no_update, no_update
        wanted = wanted_of(cast("dict[str, str]", ctx.triggered_id)["of"])
        found = or_notice(lambda: rows_response(reader, page, wanted, request))
        if isinstance(found, dict):
            return found, _count(found["rowCount"], wanted)
        return {"rowData": [], "rowCount": 0}, found


def rows_response(reader: RunReader, page: IterationPage, wanted: Wanted, request: dict[str, Any]) -> dict[str, Any]:
    """The rows of a request of the grid, and how many there are."""
    stored = reader.stored(page.iteration)
    rows_N = reader.selected(stored, _filter(reader, stored, wanted), _sorting(request.get("sortModel")))
    start = max(0, int(request.get("startRow") or 0))
    stop = min(int(request.get("endRow") or start + ROWS_AT_ONCE), start + 10 * ROWS_AT_ONCE)
    return {"rowData": _rows(reader, stored, rows_N[start:stop]), "rowCount": len(rows_N)}


def _filter(reader: RunReader, stored: StoredIteration, wanted: Wanted) -> Any:
    return wanted.filter(stored, [query.query_id for query in reader.queries(stored)])


def _sorting(model: Any) -> Sorting:
    return tuple(
        (_SORTED_BY[one["colId"]], "desc" if one.get("sort") == "desc" else "asc")
        for one in model or ()
        if one.get("colId") in _SORTED_BY
    )


def _rows(reader: RunReader, stored: StoredIteration, rows_N: np.ndarray) -> list[dict[str, Any]]:
    queries = reader.queries(stored)
    _, iteration = stored.place
    made: list[dict[str, Any]] = []
    for row in reader.index(stored).take(pa.array(rows_N)).to_pylist():
        position = row["query_position"]
        page = RolloutPage(iteration, position, row["rollout_index"])
        shown = Shown(row["agent_path"] if row["depth"] else None)
        question = queries[position].question if position < len(queries) else ""
        made.append(
            {
                "href": page.path + shown.search,
                "agent_path": visible(row["agent_path"]),
                "query": str(position),
                "rollout": str(row["rollout_index"]),
                "question": shortened(question, _QUESTION_CHARS),
                "status": row["status"].replace("_", " "),
                "stop_reason": row["stop_reason"].replace("_", " "),
                "advantage": signed(row["advantage"]),
                "why": shortened(_why(row), _QUESTION_CHARS),
                **{name: number(row[name]) for name in ("reward", "format", "correct", "main_correct", "expert")},
                **{name: number(row[name]) for name in ("weight", "sampled_tokens")},
            }
        )
    return made


def _why(row: dict[str, Any]) -> str:
    """Why it failed, has no reward, or is in no loss."""
    return row["failure"] or (row["reason"] if row["reward"] is None else None) or row["excluded_reason"] or ""


def _form(stored: StoredIteration, wanted: Wanted) -> html.Form:
    def choice(name: str, label: str, options: dict[str, str]) -> html.Label:
        entries: Any = [{"label": text, "value": value} for value, text in options.items()]
        chosen = getattr(wanted, name) or None
        return html.Label(
            [label, dcc.Dropdown(entries, chosen, id=f"filter-{name}", placeholder="any", searchable=False)],
            className="field",
        )

    def entry(name: str, label: str, kind: Any, place: str = "any") -> html.Label:
        value = getattr(wanted, name) or None
        return html.Label(
            [
                label,
                dcc.Input(
                    value,
                    type=kind,
                    id=f"filter-{name}",
                    placeholder=place,
                    debounce=0.4,
                    step="any" if kind == "number" else None,
                ),
            ],
            className="field wide" if name == "text" else "field",
        )

    return html.Form(
        [
            entry("text", "Text", "search", "in task, reply or messages"),
            choice("agent", "Agent", {name: visible(name) for name in stored.config.agents}),
            choice("status", "Status", {str(one): str(one).replace("_", " ") for one in Status}),
            choice("sign", "Advantage", {sign: _SIGNS[sign] for sign in get_args(Sign)}),
            entry("low", "Reward from", "number"),
            entry("high", "Reward to", "number"),
            entry("query", "Query", "number"),
            entry("rollout", "Rollout", "number"),
        ],
        className="filters",
        id="filters",
    )


def _table(reader: RunReader, page: IterationPage, wanted: Wanted) -> Any:
    stored = reader.stored(page.iteration)
    _filter(reader, stored, wanted)  # told of before the grid asks
    components = [part for part in ("correct", "main_correct", "expert") if _used(stored, part)]
    columns = [
        {"field": name, "headerName": header, "width": width, "sortable": column is not None}
        | ({"type": "rightAligned"} if name in _NUMBERS else {})
        | ({"cellRenderer": "PageLink", "pinned": "left"} if name == "agent_path" else {})
        | ({"cellRenderer": "Signed"} if name == "advantage" else {})
        for name, header, column, width in _COLUMNS
        if name not in ("correct", "main_correct", "expert") or name in components
    ]
    grid = dag.AgGrid(
        id={"part": "rows", "of": wanted.search},  # another filter is another grid
        columnDefs=columns,
        defaultColDef={"resizable": True, "wrapHeaderText": True, "autoHeaderHeight": True},
        rowModelType="infinite",
        dashGridOptions={
            "rowHeight": 32,
            "cacheBlockSize": ROWS_AT_ONCE,
            "rowBuffer": 0,
            "maxBlocksInCache": 20,
            "infiniteInitialRowCount": 1,
            "suppressCellFocus": True,
            "ensureDomOrder": True,
            "suppressNoRowsOverlay": True,
        },
        className="grid",
        style={"height": "calc(100vh - 120px)", "minHeight": "420px"},
    )
    return [html.Div("Reading…", id={"part": "count", "of": wanted.search}, className="count"), grid]


def _count(rows: int, wanted: Wanted) -> Any:
    if rows:
        return counted(rows, "trajectory", "trajectories")
    if wanted == Wanted():
        return notice("No trajectory", "The iteration has none: every rollout failed before its first turn.")
    return notice("No trajectory is like that", "Empty a field of the filter above to see more.")


def _used(stored: StoredIteration, component: str) -> bool:
    return any(getattr(stored.config.reward_of(agent), component, 0) for agent in stored.config.agents)
