"""Blame in a terminal. Text of a store is data: see `plain`."""

from collections.abc import Sequence

from rich.console import Console

from infra.blame.delegations import DelegationReport
from infra.blame.ranking import Blamed, BlameReport
from infra.blame.traced import Traced
from infra.terminal.fitted_table import Column, print_fitted
from infra.terminal.plain_text import on_one_line, plain
from infra.traces.links import TraceLink

_ID_DIGITS = 8  # enough to tell trajectories of an iteration apart, and what `--trajectory` takes


def render_blame(report: BlameReport, console: Console | None = None) -> None:
    """Print who moved the policy, and how to look at them."""
    console = console or Console(highlight=False)
    made = f"version {report.from_version} -> {report.to_version}"
    if report.from_version == report.to_version:
        made = f"version {report.from_version} kept: nothing to train on"
    console.print(
        plain(
            f"Policy {report.policy} of run {report.run}, iteration {report.iteration}: {made}. "
            f"{report.in_loss} of {report.trajectories} trajectories entered the loss."
        ),
        soft_wrap=True,
    )
    if report.whole is not None:
        whole = report.whole
        steps = "" if whole.optimizer_steps == 1 else f", the mean over its {whole.optimizer_steps} steps"
        console.print(
            f"Gradient of the whole loss at version {report.from_version}: norm {whole.norm:.4g} "
            f"(the update measured {whole.run_norm:.4g}{steps}).",
            soft_wrap=True,
        )
    with_gradient = report.whole is not None
    columns = [*_ABOUT, Column("A"), Column("w"), Column("w·A")]
    columns += [Column("gradient"), Column("cosine"), Column("of step")] if with_gradient else [Column("share")]
    rows = [
        [
            *_about(rank, one),
            f"{one.advantage:+.3f}",
            f"{one.weight:.3g}",
            f"{one.pull:+.3f}",
            *(_gradient(one) if with_gradient else [f"{one.share:.1%}"]),
        ]
        for rank, one in enumerate(report.ranked, start=1)
    ]
    print_fitted(console, columns, [[plain(cell) for cell in row] for row in rows])
    for rank, one in enumerate(report.ranked, start=1):
        if one.excluded_reason is not None:
            console.print(plain(f"{rank}: not in the loss, {one.excluded_reason}"), soft_wrap=True)
    _links(console, report.links())


def render_delegations(report: DelegationReport, console: Console | None = None) -> None:
    """Print what each invocation did to the others' credit."""
    console = console or Console(highlight=False)
    console.print(
        plain(
            f"Policy {report.policy} of run {report.run}, iteration {report.iteration}: {report.invocations} "
            "invocations. Others: of the same query, how their advantages would change had the invocation not been."
        ),
        soft_wrap=True,
    )
    if report.alignment == "random":
        console.print(
            "Alignment is random: its rollout's slots are drawn again without it, which is part of a change.",
            soft_wrap=True,
        )
    if not report.as_stored:
        console.print(
            "The stored weights or advantages are not what this code makes of the rewards: run `mgrpo replay`.",
            style="yellow",
            soft_wrap=True,
        )
    names = ("w·A", "others", "mean |ΔA|", "largest", "signs", "lost", "won")
    rows = [
        [
            *_about(rank, one),
            f"{one.pull:+.3f}",
            str(one.change.others),
            f"{one.change.mean_change:.3f}",
            f"{one.change.largest_change:+.3f}",
            str(one.change.sign_changes),
            str(one.change.lost),
            str(one.change.gained),
        ]
        for rank, one in enumerate(report.ranked, start=1)
    ]
    columns = [*_ABOUT, *map(Column, names)]
    print_fitted(console, columns, [[plain(cell) for cell in row] for row in rows])
    console.print(plain("signs: others whose advantage changes its sign; lost, won: that leave or enter the loss."))
    _links(console, report.links())


_ABOUT = (
    Column("#"),
    Column("id", words=True),
    Column("agent", words=True),
    Column("query", words=True, fits=True),
    Column("rollout", words=True),
    Column("reward"),
)


def _about(rank: int, one: Traced) -> list[str]:
    where = _place(one.rollout_index, one.agent_path)
    query = f"@{one.query_position} {on_one_line(one.query_id)}"
    return [str(rank), one.trajectory_id[:_ID_DIGITS], one.agent, query, where, _number(one.reward)]


def _links(console: Console, links: Sequence[TraceLink]) -> None:
    if not links:
        console.print("No trajectory.")
        return
    console.print("Traces:")
    for rank, link in enumerate(links, start=1):
        console.print(plain(f"{rank:3}  {link.command}"), soft_wrap=True)
    console.print(plain(f"In a browser: mgrpo ui {links[0].run}; the first is {links[0].address}"), soft_wrap=True)


def _place(rollout_index: int, agent_path: str) -> str:
    """Rollout, and by which calls of it: `6`, `6/0`, `6/0/2`."""
    calls = [step.partition(":")[0] for step in agent_path.split("/")[1:]]
    return "/".join([str(rollout_index), *calls])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _gradient(one: Blamed) -> list[str]:
    found = one.gradient
    if found is None:
        return ["", "", ""]
    words = (
        "" if value is None else form.format(value)
        for form, value in (("{:+.3f}", found.cosine), ("{:+.1%}", found.share))
    )
    return [f"{found.norm:.3g}", *words]
