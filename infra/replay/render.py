"""A replay's verdicts in a terminal. Text of a store is data: no markup, no control code of it takes effect."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.replay.verdicts import Outcome, ReplayReport
from infra.terminal.plain_text import plain

_STYLE = {
    Outcome.EQUAL: "green",
    Outcome.CLOSE: "green",
    Outcome.DIFFERS: "bold red",
    Outcome.UNREADABLE: "bold red",
    Outcome.SKIPPED: "yellow",
}


def render_replay(report: ReplayReport, console: Console | None = None) -> None:
    """Print a table of verdicts, the conclusion under it."""
    console = console or Console(highlight=False)
    table = Table("stage", "verdict", "compared", "", show_edge=False)
    for verdict in report.verdicts:
        table.add_row(
            plain(verdict.stage),
            Text(str(verdict.outcome), _STYLE[verdict.outcome]),
            f"{verdict.compared:,} {verdict.unit}",
            plain(verdict.words()),
        )
    console.print(table)
    for note in report.notes:
        console.print(plain(f"Note: {note}"), style="yellow")
    console.print(plain(report.conclusion()), soft_wrap=True)
