"""`mgrpo inspect` in a terminal. Text of a store is data: no markup, no control code of it takes effect."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from infra.inspection.queries import QueryLine
from infra.inspection.report import FoundQueries, FoundRollout, FoundRollouts
from infra.inspection.rollouts import RolloutLine
from infra.inspection.token_colours import legend, token_text
from infra.inspection.tree import TreeOptions, rollout_tree
from infra.terminal.fitted_table import Column, print_fitted
from infra.terminal.plain_text import on_one_line, plain
from infra.traces.links import TraceLink
from infra.traces.rollout import TraceNode
from mgrpo_core.trajectories import Query

_MOST_LINES = 40  # of queries, before the rest is left out
_MOST_ANSWERS = 5


def render_found(
    found: FoundQueries | FoundRollouts | FoundRollout,
    store: str,
    *,
    full: bool = False,
    console: Console | None = None,
) -> None:
    """Print it.

    Args:
        found: by `inspect_iteration`.
        store: its address, for what to type next.
        full: nothing is left out.
        console: where to; None = the terminal.
    """
    console = console or Console(highlight=False)
    match found:
        case FoundQueries():
            _queries(console, found, store, full)
        case FoundRollouts():
            _rollouts(console, found, store)
        case FoundRollout():
            _rollout(console, found, full)


def _queries(console: Console, found: FoundQueries, store: str, full: bool) -> None:
    run, iteration = found.stored.place
    lines = found.lines if full else found.lines[:_MOST_LINES]
    console.print(plain(f"Iteration {iteration} of run {run}: {_sum_up(found.lines)}"), soft_wrap=True)
    if not lines:
        return
    columns = [
        Column("query", words=True),
        Column("question", words=True, fits=True),
        Column("success"),
        Column("reward"),
        Column("calls"),
        Column("signal", words=True),
        Column("spoiled"),
        Column("lost"),
        Column("match"),
    ]
    print_fitted(console, columns, [_query_cells(one) for one in lines])
    if len(lines) < len(found.lines):
        console.print(f"… {len(found.lines) - len(lines):,} more queries: --full, or a filter.", style="italic")
    console.print(
        "calls: of sub-agents. signal: agents with a trajectory in the loss. spoiled: trajectories that the policy "
        "failed; lost: that our side did.",
        style="dim",
    )
    console.print(plain(f"One query: {_next(found.stored.place, store, lines[0].position)}"), soft_wrap=True)


def _sum_up(lines: Sequence[QueryLine]) -> str:
    if not lines:
        return "no trajectory matches."
    scored = [one.success for one in lines if one.success is not None]
    success = f"success {sum(scored) / len(scored):.3f}" if scored else "nothing scored"
    silent = sum(not one.signal for one in lines)
    many = "query" if len(lines) == 1 else "queries"
    matches = sum(one.matches for one in lines)
    return f"{len(lines):,} {many}, {silent:,} of them without signal, {success}, {matches:,} trajectories."


def _query_cells(one: QueryLine) -> list[Text]:
    lost = Text(str(one.infra_failed), "red" if one.infra_failed else "")
    signal = plain(", ".join(one.signal)) if one.signal else Text("none", "yellow")
    return [
        Text(f"@{one.position}"),
        Text(on_one_line(one.question)),
        Text(_number(one.success)),
        Text(_number(one.reward)),
        Text(str(one.invocations)),
        signal,
        Text(str(one.policy_failed)),
        lost,
        Text(str(one.matches)),
    ]


def _rollouts(console: Console, found: FoundRollouts, store: str) -> None:
    _asked(console, found.stored.place, found.position, found.query)
    if not found.lines:
        console.print("No trajectory matches.")
        return
    columns = [
        Column("rollout"),
        Column("correct"),
        Column("reward"),
        Column("A"),
        Column("calls", words=True),
        Column("tokens"),
        Column("failed"),
        Column("ended by", words=True),
        Column("answer", words=True, fits=True),
    ]
    print_fitted(console, columns, [_rollout_cells(one) for one in found.lines])
    if reasons := sorted({one.reason for one in found.lines if one.reason is not None}):
        console.print(plain(f"Not in the main agent's loss: {'; '.join(map(on_one_line, reasons))}."), style="yellow")
    position, rollout = found.position, found.lines[0].rollout
    console.print(plain(f"One rollout: {_next(found.stored.place, store, position, rollout)}"), soft_wrap=True)


def _rollout_cells(one: RolloutLine) -> list[Text]:
    calls = ", ".join(f"{on_one_line(part.agent)} {part.count} (reward {_number(part.reward)})" for part in one.calls)
    advantage = Text("-" if one.advantage is None or one.reason is not None else f"{one.advantage:+.3f}")
    if one.reason is None and one.advantage:
        advantage.stylize("green" if one.advantage > 0 else "red")
    return [
        Text(str(one.rollout)),
        Text(_number(one.correct)),
        Text(_number(one.reward)),
        advantage,
        Text(calls or "none"),
        Text(f"{one.sampled_tokens:,}"),
        Text(str(one.failed), "red" if one.failed else ""),
        Text(on_one_line(one.ended)),
        Text("none", "dim") if one.reply is None else Text(on_one_line(one.reply)),
    ]


def _rollout(console: Console, found: FoundRollout, full: bool) -> None:
    key = found.trace.root.trajectory.key
    _asked(console, found.stored.place, found.position, found.trace.query, key.rollout_index)
    if not found.nodes:
        console.print("No trajectory of this rollout matches.")
        return
    coloured = console.color_system is not None
    if found.texts:
        console.print(legend(coloured))

    def tokens(node: TraceNode) -> RenderableType:
        texts = found.texts[node.trajectory.trajectory_id]
        return token_text(node.trajectory, texts, full=full, coloured=coloured)

    options = TreeOptions(full=full, without=found.without, tokens=tokens if found.texts else None)
    for node in found.nodes:
        console.print(rollout_tree(node, options))


def _asked(console: Console, place: tuple[str, int], position: int, query: Query, rollout: int | None = None) -> None:
    run, iteration = place
    which = f", rollout {rollout}" if rollout is not None else ""
    title = f"Query @{position} {on_one_line(query.query_id)}{which}; iteration {iteration} of run {run}"
    console.print(plain(title), style="bold", soft_wrap=True)
    console.print(plain(f"asked: {query.question}"))
    answers = ", ".join(map(on_one_line, query.answers[:_MOST_ANSWERS]))
    more = len(query.answers) - _MOST_ANSWERS
    console.print(plain(f"right: {answers}{f' and {more} more' if more > 0 else ''}"))


def _next(place: tuple[str, int], store: str, position: int, rollout: int | None = None) -> str:
    return TraceLink(store, *place, position, rollout).command


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
