"""What was said in a trajectory: its messages, and of each turn what came of it."""

from typing import Any

from dash import dcc, html

from infra.traces.rollout import TraceNode
from infra.traces.visible import visible
from infra.ui.words import counted
from mgrpo_core.trajectories import Message, Turn

_MOST_CHARS = 40_000


def dialogue(node: TraceNode, link_to: dict[str, str]) -> html.Div:
    """Messages in order, each policy's message with its turn.

    Args:
        node: the trajectory.
        link_to: address of each child, by agent path.
    """
    turns = iter(node.trajectory.turns)
    children = iter(node.children)
    shown: list[Any] = []
    for message in node.trajectory.messages:
        turn = next(turns, None) if message.role == "assistant" else None
        child = None
        if turn is not None and turn.action == "delegate" and turn.error is None:
            child = next(children, None)
        shown.append(_message(message, turn, child, link_to))
    return html.Div(shown or [html.P("Nothing was said.", className="quiet")], className="dialogue")


def text_block(text: str) -> html.Pre:
    """Text as it stands, cut where it is very long."""
    rest = len(text) - _MOST_CHARS
    cut = [html.Em(f"\n… {counted(rest, 'character', 'characters')} more are in the store.")] if rest > 0 else []
    return html.Pre([visible(text[:_MOST_CHARS]), *cut])


def _message(message: Message, turn: Turn | None, child: TraceNode | None, link_to: dict[str, str]) -> html.Div:
    who = message.role if message.name is None else f"{message.role} {visible(message.name)}"
    head: list[Any] = [html.Strong(who)]
    if turn is not None:
        head += [html.Span(_outcome(turn), className="quiet"), html.Span(_generation(turn), className="quiet right")]
    if child is not None:
        path = child.trajectory.key.agent_path
        head.append(dcc.Link(f"→ {visible(path)}", href=link_to[path]))
    fault = [html.P(visible(turn.error), className="fault")] if turn is not None and turn.error else []
    return html.Div(
        [html.Div(head, className="said-by"), text_block(message.content), *fault], className=f"message {message.role}"
    )


def _outcome(turn: Turn) -> str:
    name = f" {visible(turn.action_name)}" if turn.action_name else ""
    got = ""
    if turn.observation_chars:
        tokens = counted(turn.observation_tokens, "token", "tokens")
        got = f", got {tokens}" + (
            f" of a reply that was cut ({turn.observation_chars:,} characters)" if turn.observation_cut else ""
        )
    return f"{turn.action}{name}{got}"


def _generation(turn: Turn) -> str:
    return (
        f"{counted(turn.stop - turn.start, 'token', 'tokens')}, finish {turn.finish_reason}, version "
        f"{turn.policy_version}, seed {turn.seed}"
    )
