"""A trajectory's reward and credit in a few words and in a table."""

from typing import Any

from dash import html

from infra.traces.rollout import TraceNode
from infra.traces.visible import visible
from infra.ui.words import number, signed
from mgrpo_core.trajectories import Status


def chips(node: TraceNode) -> html.Span:
    """Reward and advantage, and what went wrong."""
    parts: list[Any] = []
    reward = node.reward.reward if node.reward else None
    parts.append(html.Span("no reward" if reward is None else f"reward {number(reward)}", className="chip"))
    credit = node.advantage
    if credit is None or not credit.included:
        parts.append(html.Span("not in the loss", className="chip"))
    else:
        look = "good" if credit.advantage > 0 else "bad" if credit.advantage < 0 else ""
        parts.append(html.Span(f"advantage {signed(credit.advantage)}", className=f"chip {look}"))
    if node.trajectory.status != Status.OK:
        parts.append(html.Span(str(node.trajectory.status).replace("_", " "), className="chip fault"))
    return html.Span(parts, className="chips")


def score_tables(node: TraceNode) -> html.Div:
    """The reward by component, and the advantage with its group."""
    return html.Div([_reward(node), _credit(node), _facts(node)], className="scores")


def _reward(node: TraceNode) -> html.Table:
    row = node.reward
    if row is None:
        return _table("Reward", [("", "no row in the rewards table", "")])
    lines = [(part.name.replace("_", " "), number(part.score), f"× {number(part.weight)}") for part in row.components]
    lines.append(("reward", number(row.reward), row.status))
    lines += [
        (name, visible(value), "")
        for name, value in (("why", row.reason), ("verifier", row.verifier), ("judge", row.judge_version))
        if value
    ]
    return _table("Reward", lines)


def _credit(node: TraceNode) -> html.Table:
    row = node.advantage
    if row is None:
        return _table("Credit", [("", "no row in the advantages table", "")])
    lines = [
        ("advantage", signed(row.advantage), ""),
        ("weight", number(row.weight), "" if row.included else "not in the loss"),
        ("group", f"mean {number(row.group_mean)}, std {number(row.group_std)}", f"of {row.group_size}"),
    ]
    return _table("Credit", lines + ([("why not", visible(row.excluded_reason), "")] if row.excluded_reason else []))


def _facts(node: TraceNode) -> html.Table:
    one = node.trajectory
    lines = [
        ("status", str(one.status).replace("_", " "), str(one.stop_reason).replace("_", " ")),
        ("policy", visible(one.policy), f"temperature {number(one.temperature)}"),
        (
            "turns",
            number(len(one.turns)),
            f"{number(sum(turn.stop - turn.start for turn in one.turns))} tokens sampled",
        ),
    ]
    return _table("Trajectory", lines + ([("failure", visible(one.failure), "")] if one.failure else []))


def _table(title: str, lines: list[tuple[str, str, str]]) -> html.Table:
    rows = [
        html.Tr([html.Th(name, scope="row"), html.Td(value), html.Td(note, className="quiet")])
        for name, value, note in lines
    ]
    return html.Table([html.Caption(title), html.Tbody(rows)])
