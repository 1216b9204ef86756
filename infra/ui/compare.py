"""Two rollouts of a query side by side: what each did, and what it was worth."""

from typing import Any

from dash import Dash, Input, Output, dcc, html, no_update

from infra.traces.rollout import RolloutTrace, TraceNode
from infra.traces.visible import shortened, visible
from infra.ui.addresses import ComparePage, RolloutPage, Shown, page_of
from infra.ui.dialogue import dialogue
from infra.ui.notices import or_notice
from infra.ui.rollout_tree import heading, nodes_of, rollout_choice
from infra.ui.run_reader import RunReader
from infra.ui.scores import chips
from infra.ui.words import number, signed

_REPLY_CHARS = 200


def layout() -> html.Main:
    """The page, without what is read."""
    waiting = html.Div("Reading…", className="waiting")
    return html.Main([dcc.Location(id="compare-address", refresh="callback-nav"), html.Div(waiting, id="compare")])


def register(app: Dash, reader: RunReader) -> None:
    """Fill the page."""

    @app.callback(Output("compare", "children"), Input("compare-address", "pathname"))
    def fill(path: str) -> Any:
        page = page_of(path)
        if not isinstance(page, ComparePage):
            return no_update
        return or_notice(lambda: _content(reader, page))


def _content(reader: RunReader, page: ComparePage) -> list[Any]:
    stored = reader.stored(page.iteration)
    pages = [RolloutPage(page.iteration, page.position, rollout) for rollout in (page.left, page.right)]
    traces = [reader.rollout(stored, one.position, one.rollout, tokens=False) for one in pages]
    choices = [
        rollout_choice(
            reader,
            pages[0],
            "left:",
            lambda other: ComparePage(page.iteration, page.position, other, page.right).path,
            chosen=page.left,
        ),
        rollout_choice(
            reader,
            pages[1],
            "right:",
            lambda other: ComparePage(page.iteration, page.position, page.left, other).path,
            chosen=page.right,
        ),
    ]
    return [
        heading(page, traces[0], f"rollouts {page.left} and {page.right}"),
        *choices,
        _figures(traces, pages),
        html.Div([_side(trace, one) for trace, one in zip(traces, pages, strict=True)], className="side-by-side"),
    ]


def _figures(traces: list[RolloutTrace], pages: list[RolloutPage]) -> html.Table:
    """What differs, in numbers."""

    def line(name: str, say: Any) -> html.Tr:
        words = [say(trace) for trace in traces]
        look = "differs" if words[0] != words[1] else ""
        return html.Tr([html.Th(name, scope="row"), *(html.Td(one) for one in words)], className=look)

    parts = [part.name for part in traces[0].root.reward.components] if traces[0].root.reward else []
    lines = [
        line("answer", lambda trace: shortened(trace.root.trajectory.reply or "none", _REPLY_CHARS)),
        line("reward", lambda trace: number(_reward(trace.root, "reward"))),
        *(line(part.replace("_", " "), lambda trace, part=part: number(_reward(trace.root, part))) for part in parts),
        line("advantage", lambda trace: signed(trace.root.advantage.advantage if trace.root.advantage else None)),
        line("calls", lambda trace: number(sum(1 for _ in nodes_of(trace.root)) - 1)),
        line("reward of sub-agents, mean", lambda trace: number(_mean_below(trace.root))),
        line(
            "turns, all agents", lambda trace: number(sum(len(node.trajectory.turns) for node in nodes_of(trace.root)))
        ),
        line("sampled tokens, all agents", lambda trace: number(sum(map(_sampled, nodes_of(trace.root))))),
        line("stop", lambda trace: str(trace.root.trajectory.stop_reason).replace("_", " ")),
    ]
    head = [dcc.Link(f"rollout {page.rollout}", href=page.path) for page in pages]
    return html.Table(
        [html.Thead(html.Tr([html.Th(), *map(html.Th, head)])), html.Tbody(lines)], className="figures", id="figures"
    )


def _side(trace: RolloutTrace, page: RolloutPage) -> html.Section:
    """One rollout: the main trajectory open, sub-agents to be opened."""
    root_path = trace.root.trajectory.key.agent_path
    nodes = list(nodes_of(trace.root))
    paths = [node.trajectory.key.agent_path for node in nodes]
    addresses = {path: page.path + Shown(None if path == root_path else path).search for path in paths}
    parts = [
        html.Details(
            [
                html.Summary(
                    [
                        html.Strong(visible(path)),
                        chips(node),
                        html.Span(shortened(node.trajectory.task, 80), className="task"),
                    ]
                ),
                dialogue(node, addresses),
            ],
            open=node is trace.root,
        )
        for path, node in zip(paths, nodes, strict=True)
    ]
    return html.Section([html.H2(dcc.Link(f"Rollout {page.rollout}", href=page.path)), *parts])


def _reward(node: TraceNode, name: str) -> float | None:
    return getattr(node.reward, name) if node.reward else None


def _mean_below(root: TraceNode) -> float | None:
    rewards = [
        reward for node in nodes_of(root) if node is not root and (reward := _reward(node, "reward")) is not None
    ]
    return sum(rewards) / len(rewards) if rewards else None


def _sampled(node: TraceNode) -> int:
    """From the turns: the mask is not read for this page."""
    return sum(turn.stop - turn.start for turn in node.trajectory.turns)
