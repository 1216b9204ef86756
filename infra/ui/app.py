"""The pages as one Dash app: a bar at the top, under it the page that the address names."""

from collections.abc import Collection
from typing import Any

from dash import Dash, Input, Output, State, dcc, html

from infra.ui import compare, overview, rollout_tree, trajectories
from infra.ui.addresses import OVERVIEW, ComparePage, IterationPage, RolloutPage, page_of
from infra.ui.notices import as_page, not_found, or_notice
from infra.ui.run_reader import RunReader
from infra.ui.security import secure

# What is seen before the first script has run.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
{metas}<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>{title}</title>{css}
</head>
<body>
<div id="react-entry-point"><div class="bar"><span class="brand">mgrpo</span> {run}</div><main><h1>Run {run}</h1>
<div class="waiting">Opening…</div></main></div>
<footer>{config}{scripts}{renderer}</footer>
</body>
</html>"""


class _Pages(Dash):
    """Dash with a page that shows something before its scripts run."""

    run_name: str

    def interpolate_index(self, **parts: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _PAGE.format(run=self.run_name, **parts)  # run names have no markup in them


def build_app(reader: RunReader, hosts: Collection[str] = ()) -> Dash:
    """The pages of a run.

    Args:
        reader: the run.
        hosts: names besides this machine's own under which people reach the server.
    """
    run = reader.run
    app = _Pages(
        __name__,
        title=f"mgrpo · {run.name}",
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,  # a page's parts are there when it is
        enable_mcp=False,
    )
    app.run_name = run.name
    app.layout = html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            html.Div(
                [
                    dcc.Link("mgrpo", href=OVERVIEW, className="brand"),
                    dcc.Link(run.name, href=OVERVIEW),
                    html.Span(run.files.url, className="quiet right"),
                ],
                className="bar",
            ),
            html.Div(html.Main([html.H1(f"Run {run.name}"), html.Div("Opening…", className="waiting")]), id="page"),
        ]
    )

    @app.callback(Output("page", "children"), Input("url", "pathname"), State("url", "search"))
    def show(path: str | None, search: str | None) -> Any:
        page = page_of(path)
        if isinstance(page, IterationPage):
            found = or_notice(lambda: trajectories.layout(reader, page, search))
            return found if isinstance(found, html.Main) else as_page(found)
        if isinstance(page, RolloutPage):
            return rollout_tree.layout()
        if isinstance(page, ComparePage):
            return compare.layout()
        return overview.layout() if path in (None, "", OVERVIEW) else not_found(path or "")

    for part in (overview, trajectories, rollout_tree, compare):
        part.register(app, reader)
    secure(app.server, app.csp_hashes(), hosts)
    return app
