"""A rollout: who delegated what to whom, and the trajectory that is looked at."""

from collections.abc import Iterator
from typing import Any

from dash import Dash, Input, Output, dcc, html, no_update

from infra.traces.rollout import RolloutTrace, TraceNode
from infra.traces.visible import shortened, visible
from infra.ui.addresses import VIEWS, ComparePage, IterationPage, RolloutPage, Shown, Wanted, page_of, shown_of
from infra.ui.dialogue import dialogue
from infra.ui.notices import notice, or_notice
from infra.ui.run_reader import RunReader
from infra.ui.scores import chips, score_tables
from infra.ui.tokens import tokens_view
from infra.ui.words import number

_TASK_CHARS, _ANSWERS = 90, 5
_VIEW_NAMES = {"dialogue": "Dialogue", "logprob": "Tokens: log-prob", "advantage": "advantage", "mask": "mask"}


def layout() -> html.Main:
    """The page, without what is read."""
    waiting = html.Div("Reading…", className="waiting")
    return html.Main([dcc.Location(id="rollout-address", refresh="callback-nav"), html.Div(waiting, id="rollout")])


def register(app: Dash, reader: RunReader) -> None:
    """Fill the page; another trajectory or view of it is another address."""

    @app.callback(
        Output("rollout", "children"), Input("rollout-address", "search"), Input("rollout-address", "pathname")
    )
    def fill(search: str, path: str) -> Any:
        page = page_of(path)
        if not isinstance(page, RolloutPage):
            return no_update
        return or_notice(lambda: _content(reader, page, shown_of(search)))


def heading(page: RolloutPage | ComparePage, trace: RolloutTrace, words: str) -> html.Header:
    """Which question, and what would have been right."""
    answers = ", ".join(visible(one) for one in trace.query.answers[:_ANSWERS])
    more = len(trace.query.answers) - _ANSWERS
    of_query = IterationPage(page.iteration).path + Wanted(query=str(page.position)).search
    return html.Header(
        [
            html.Nav(
                [
                    dcc.Link(f"Iteration {page.iteration}", href=IterationPage(page.iteration).path),
                    dcc.Link(f"query {page.position}", href=of_query),
                    html.Span(words),
                ],
                className="crumbs",
            ),
            html.H1(visible(trace.query.question), className="question"),
            html.P(
                [
                    html.Span("right: ", className="quiet"),
                    answers + (f" and {more} more" if more > 0 else "") or "no reference answer",
                    html.Span(f"  ·  query id {visible(trace.query.query_id)}", className="quiet"),
                ]
            ),
        ]
    )


def rollout_choice(
    reader: RunReader,
    page: RolloutPage,
    label: str,
    address: Any,
    *,
    chosen: int | None = None,
    left_out: int | None = None,
) -> html.Nav:
    """The rollouts of the query as links, each with its reward.

    Args:
        reader: the run.
        page: of any rollout of the query.
        label: what a click does.
        address: of the page for a rollout.
        chosen: the one that is looked at.
        left_out: one that is no choice.
    """
    links = []
    for row in reader.group(reader.stored(page.iteration), page.position).to_pylist():
        rollout = row["rollout_index"]
        words = [html.Strong(str(rollout)), html.Span(number(row["reward"]), className="quiet")]
        if rollout == left_out:
            continue
        if rollout == chosen:
            links.append(html.Span(words, className="choice chosen", title="this one"))
        else:
            links.append(dcc.Link(words, href=address(rollout), className="choice", title=f"rollout {rollout}, reward"))
    return html.Nav([html.Span(label, className="quiet"), *links], className="choices")


def nodes_of(node: TraceNode) -> Iterator[TraceNode]:
    """A node and all below it, in the order of the calls."""
    yield node
    for child in node.children:
        yield from nodes_of(child)


def _content(reader: RunReader, page: RolloutPage, shown: Shown) -> list[Any]:
    stored = reader.stored(page.iteration)
    with_tokens = shown.view != "dialogue"
    trace = reader.rollout(stored, page.position, page.rollout, tokens=with_tokens)
    by_path = {node.trajectory.key.agent_path: node for node in nodes_of(trace.root)}
    root_path = trace.root.trajectory.key.agent_path
    node = by_path.get(shown.agent_path or root_path)
    addresses = {path: _address(page, shown, path, root_path) for path in by_path}
    choices = [
        rollout_choice(
            reader,
            page,
            "rollouts, with reward:",
            lambda other: RolloutPage(page.iteration, page.position, other).path,
            chosen=page.rollout,
        ),
        rollout_choice(
            reader,
            page,
            "side by side with:",
            lambda other: ComparePage(page.iteration, page.position, page.rollout, other).path,
            left_out=page.rollout,
        ),
    ]
    if node is None:
        detail: Any = notice("No such trajectory", f"This rollout has {', '.join(by_path)}.", wrong=True)
    else:
        path = node.trajectory.key.agent_path
        body = tokens_view(reader, stored, node, page, shown) if with_tokens else dialogue(node, addresses)
        detail = html.Article(
            [
                html.Header(
                    [
                        html.H2(visible(path)),
                        chips(node),
                        html.Span(f"id {node.trajectory.trajectory_id}", className="quiet right"),
                    ]
                ),
                *([_asked(node)] if node is not trace.root else []),
                score_tables(node),
                _views(page, shown),
                body,
            ],
            className="trajectory",
            id="trajectory",
        )
    return [
        heading(page, trace, f"rollout {page.rollout}"),
        *choices,
        html.Div(
            [html.Nav(_branch(trace.root, node, addresses), className="tree", id="tree"), detail], className="with-tree"
        ),
    ]


def _address(page: RolloutPage, shown: Shown, path: str, root_path: str) -> str:
    return page.path + shown.but(agent_path=None if path == root_path else path, start=0).search


def _branch(node: TraceNode, chosen: TraceNode | None, addresses: dict[str, str]) -> html.Ul:
    """A trajectory and those that it called."""
    key = node.trajectory.key
    call = f"{key.call_index} " if key.depth else ""
    look = "leaf chosen" if node is chosen else "leaf"
    said = node.trajectory.reply
    leaf = dcc.Link(
        [
            html.Strong(f"{call}{visible(key.agent)}"),
            chips(node),
            html.Span(shortened(node.trajectory.task, _TASK_CHARS), className="task"),
            html.Span("no reply" if said is None else f"→ {shortened(said, _TASK_CHARS)}", className="task reply"),
        ],
        href=addresses[key.agent_path],
        className=look,
    )
    return html.Ul(html.Li([leaf, *(_branch(child, chosen, addresses) for child in node.children)]))


def _asked(node: TraceNode) -> html.P:
    return html.P([html.Span("asked: ", className="quiet"), visible(node.trajectory.task)], className="asked")


def _views(page: RolloutPage, shown: Shown) -> html.Nav:
    links = [
        html.Span(_VIEW_NAMES[view], className="view chosen")
        if view == shown.view
        else dcc.Link(_VIEW_NAMES[view], href=page.path + shown.but(view=view, start=0).search, className="view")
        for view in VIEWS
    ]
    return html.Nav(links, className="views", id="views")
