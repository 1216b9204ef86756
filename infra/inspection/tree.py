"""A rollout as a tree: who delegated to whom, turn by turn, with rewards and credit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from infra.terminal.plain_text import on_one_line, plain
from infra.traces.rollout import RewardRow, TraceNode
from infra.traces.visible import visible
from mgrpo_core.credit.leave_one_out import CreditChange
from mgrpo_core.trajectories import Message, Status, Turn

_LINES, _CHARS = 6, 400  # of a text, before the rest is left out
_GUIDES = "dim"

TokensOf = Callable[[TraceNode], RenderableType]


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """What a tree shows.

    Attributes:
        full: texts whole, and the system prompt.
        without: by trajectory id, what the group's credit would be without the invocation.
        tokens: what to show in place of the messages; None = the messages.
    """

    full: bool = False
    without: Mapping[str, CreditChange] | None = None
    tokens: TokensOf | None = None


def rollout_tree(node: TraceNode, options: TreeOptions) -> Tree:
    """A trajectory and all under it."""
    tree = Tree(_head(node, options), guide_style=_GUIDES)
    _fill(tree, node, options)
    return tree


def _fill(tree: Tree, node: TraceNode, options: TreeOptions) -> None:
    one = node.trajectory
    if one.key.depth:
        tree.add(_labelled("task", one.task, options))
    children = iter(node.children)
    if options.tokens is not None:
        tree.add(options.tokens(node))
    else:
        _dialogue(tree, node, children, options)
    for child in children:  # that no turn above has shown
        _fill(tree.add(_head(child, options)), child, options)
    if one.failure is not None:
        tree.add(Text.assemble(("failed by our side: ", "bold red"), _cut(one.failure, options)))


def _dialogue(tree: Tree, node: TraceNode, children: Iterator[TraceNode], options: TreeOptions) -> None:
    turns = iter(enumerate(node.trajectory.turns, start=1))
    asked = False  # the first of the user's messages is the task, which stands above
    for message in node.trajectory.messages:
        if message.role == "assistant":
            number, turn = next(turns, (0, None))
            branch = tree.add(_turn(number, turn, message, options))
            if turn is not None and turn.action == "delegate" and turn.error is None:
                child = next(children, None)
                if child is not None:
                    _fill(branch.add(_head(child, options)), child, options)
        elif message.role == "tool":
            name = message.name or "reply"
            tree.add(_labelled(f"from {name}", message.content, options))
        elif options.full or (message.role == "user" and asked):
            tree.add(_labelled(message.role, message.content, options))
        asked = asked or message.role == "user"


def _head(node: TraceNode, options: TreeOptions) -> Text:
    """Who it is, what it got, and how it ended."""
    one = node.trajectory
    call = f" {one.key.call_index}" if one.key.depth else ""
    text = Text.assemble((visible(f"{one.key.agent}{call}"), "bold"), "  ")
    text.append_text(_reward(node.reward)).append("  ").append_text(_credit(node))
    if node.reward is not None and (parts := _parts(node.reward)):
        text.append(f"\n{parts}", style="dim")
    ended = "" if one.status is Status.OK else f"{one.status}, "
    sizes = f"{_counted(len(one.turns), 'turn')}, {_counted(_sampled(one.turns), 'token')} sampled"
    text.append(f"\n{ended}ended by {one.stop_reason}, {sizes}, id {one.trajectory_id[:8]}", style="dim")
    change = (options.without or {}).get(one.trajectory_id)
    if change is not None and change.others:
        words = f"mean |ΔA| {change.mean_change:.3f} of {_counted(change.others, 'other')}"
        words += f", {change.sign_changes} would change sign" if change.sign_changes else ""
        words += f", {change.lost} would leave the loss" if change.lost else ""
        words += f", {change.gained} would enter it" if change.gained else ""
        text.append(f"\nwithout it: {words}", style="dim")
    return text


def _reward(reward: RewardRow | None) -> Text:
    if reward is None:
        return Text("no reward row", "red")
    if reward.reward is None:
        return Text.assemble(("no reward: ", "red"), on_one_line(f"{reward.status}, {reward.reason or 'no reason'}"))
    text = Text.assemble("reward ", (f"{reward.reward:.3g}", "bold"))
    if reward.reason:
        text.append(f" ({on_one_line(reward.reason)})", style="dim")
    return text


def _parts(reward: RewardRow) -> str:
    """What the reward is made of: weight x component."""
    return " + ".join(
        f"{part.weight:g} x {part.name} {'none' if part.score is None else format(part.score, '.3g')}"
        for part in reward.components
        if part.weight
    )


def _credit(node: TraceNode) -> Text:
    credit = node.advantage
    if credit is None:
        return Text("no advantage row", "red")
    if not credit.included:
        return Text(f"not in the loss: {on_one_line(credit.excluded_reason or 'no reason')}", "yellow")
    colour = "green" if credit.advantage > 0 else "red" if credit.advantage < 0 else "default"
    return Text.assemble("A ", (f"{credit.advantage:+.3f}", colour), f"  w {credit.weight:.3g}")


def _turn(number: int, turn: Turn | None, message: Message, options: TreeOptions) -> Text:
    """What the policy wrote, under what was made of it."""
    if turn is None:
        return _labelled("wrote", message.content, options)
    name = f" {on_one_line(turn.action_name)}" if turn.action_name else ""
    colour = "red" if turn.action == "invalid" or turn.error else "cyan"
    text = Text.assemble(f"{number}  ", (f"{turn.action}{name}", colour))
    text.append(f"  {_counted(turn.stop - turn.start, 'token')}", style="dim")
    if turn.observation_cut:
        words = f"{_counted(turn.observation_tokens, 'token')} of {turn.observation_chars:,} characters"
        text.append(f", reply cut to {words}", style="yellow")
    if turn.error:
        text.append(f"\n{on_one_line(turn.error)}", style="red")
    return text.append("\n").append_text(_cut(message.content, options))


def _labelled(label: str, content: str, options: TreeOptions) -> Text:
    return Text.assemble((f"{on_one_line(label)}: ", "magenta"), _cut(content, options))


def _cut(content: str, options: TreeOptions) -> Text:
    """The text, or its beginning and how much more there is."""
    if options.full:
        return plain(content)
    shown = "\n".join(content[:_CHARS].split("\n")[:_LINES])
    text = plain(shown)
    if len(shown) < len(content):
        text.append(f" … {len(content) - len(shown):,} more characters: --full", style="dim italic")
    return text


def _sampled(turns: Sequence[Turn]) -> int:
    return sum(turn.stop - turn.start for turn in turns)


def _counted(count: int, word: str) -> str:
    return f"1 {word}" if count == 1 else f"{count:,} {word}s"
