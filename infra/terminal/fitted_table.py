"""Tables in a terminal whose numbers are never cut: one column of text takes what room is left."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2  # between columns: a space of padding, and one for the divider
_LEAST = 8  # cells of the column that fits itself in


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        words: text, to the left; else numbers, to the right.
        fits: is cut to what room the others leave. One column of a table, at most.
    """

    name: str
    words: bool = False
    fits: bool = False


def print_fitted(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> None:
    """Print rows, each one line. On a terminal too narrow for the numbers, lines go over its edge."""
    widths = [
        max([cell_len(column.name), *(cell_len(row[place].plain) for row in rows)])
        for place, column in enumerate(columns)
    ]
    fixed = sum(width + _GAP for width, column in zip(widths, columns, strict=True) if not column.fits)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for width, column in zip(widths, columns, strict=True):
        room = min(width, max(_LEAST, console.width - fixed)) if column.fits else width
        justify = "left" if column.words else "right"
        table.add_column(column.name, justify=justify, width=room, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    width = console.width
    console.width = max(width, fixed + _LEAST + _GAP)  # rich would squeeze the numbers otherwise
    console.print(table, crop=False)
    console.width = width
