"""A what-if in a terminal, and as Markdown: what changes in credit, and what in the updates."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from infra.replay.verdicts import escaped
from infra.replay.what_if import WhatIf
from infra.terminal.plain_text import plain

_CREDIT = ("variation", "agent", "change sign", "groups gain signal", "groups lose signal", "mean change of w·A")
_UPDATE = ("variation", "policy", "gradient cosine", "norm", "clip fraction", "steps", "KL from the run's update")
_LINE = "\n"  # between a variation's changes
_Row = tuple[str, ...]


def render_what_if(found: WhatIf, console: Console | None = None) -> None:
    """Print a table for credit, and one for the updates where there are any."""
    console = console or Console(highlight=False)
    console.print(plain(_title(found)))
    for head, rows in _tables(found):
        table = Table(show_edge=False)
        for name in head:
            table.add_column(name, no_wrap=name in head[:2], overflow="fold")
        for label, *cells in rows:
            table.add_row(plain(label), *(plain(cell) for cell in cells))
        console.print(table)


def what_if_markdown(found: WhatIf) -> str:
    """The same for an artifact."""
    parts = [f"**{escaped(_title(found))}**"]
    for head, rows in _tables(found):
        lines = [head, ("---",) * len(head), *(tuple(escaped(cell) for cell in row) for row in rows)]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def _title(found: WhatIf) -> str:
    return f"Iteration {found.iteration} of run {found.run}: stored -> what it would have been"


def _tables(found: WhatIf) -> list[tuple[_Row, Sequence[_Row]]]:
    credit = [
        (
            _LINE.join(tried.changes),
            one.agent,
            f"{one.sign_changes} of {one.trajectories}",
            f"{one.gained} of {one.groups}",
            f"{one.lost} of {one.groups}",
            f"{one.mean_change:.4g}",
        )
        for tried in found.tried
        for one in tried.agents
    ]
    updates = [
        (
            _LINE.join(tried.changes),
            one.policy,
            "no signal" if one.cosine is None else f"{one.cosine:.6f}",
            f"{one.stored_norm:.4g} -> {one.norm:.4g}",
            f"{one.stored_clip_fraction:.4g} -> {one.clip_fraction:.4g}",
            str(one.optimizer_steps),
            f"{one.approx_kl:.4g}",
        )
        for tried in found.tried
        for one in tried.policies
    ]
    return [(_CREDIT, credit), *([(_UPDATE, updates)] if updates else [])]
