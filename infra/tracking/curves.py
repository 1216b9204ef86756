"""The curves of a run as one picture: is it learning, from what, and at what cost."""

import math
from collections.abc import Sequence
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from infra.tracking.charts import (
    GREEDY,
    HELD_OUT,
    HELD_OUT_HIGH,
    HELD_OUT_LOW,
    ITERATION,
    SUCCESS,
    Chart,
    Line,
    Rows,
    charts,
)
from mgrpo_core.errors import ShapeError

_INK, _GRID = "#333333", "#E6E6E6"
_COLUMNS = 3
_MARKED_TO = 30  # points, up to which each is marked
_SMOOTHED_FROM = 60  # iterations from which single ones are noise to the eye
_STYLES = {"solid": ("-", 1.8), "dot": (":", 1.4)}


def curves_png(rows: Rows, title: str) -> bytes:
    """Draw the charts that are pictured and have numbers, as the bytes of a PNG about 1,500 pixels wide.

    A value that is missing, NaN or infinite is a gap. From 60 iterations on, single ones are drawn faint under their
    running mean.

    Raises: ShapeError if no row has both an iteration and a number that a chart draws.
    """
    rows = sorted((row for row in rows if ITERATION in row), key=lambda row: row[ITERATION])
    pictured = [chart for chart in charts(rows) if chart.pictured]
    if not pictured:
        raise ShapeError(
            f"curves of {title!r}: {len(rows)} rows with an {ITERATION!r}, none with a metric to draw such as "
            f"{SUCCESS!r} or 'main/reward'. Pass the metrics of at least one committed iteration."
        )
    lines = math.ceil(len(pictured) / _COLUMNS)
    height = 1.1 + 3.4 * lines
    figure = Figure(figsize=(15, height), dpi=100)
    FigureCanvasAgg(figure)
    # Margins in inches, the same for every picture: a layout engine draws everything several times to find its own.
    edges = {"left": 0.8 / 15, "right": 1 - 0.2 / 15, "bottom": 0.6 / height, "top": 1 - 0.95 / height}
    figure.subplots_adjust(**edges, wspace=0.24, hspace=0.3)
    figure.suptitle(title, x=0.2 / 15, y=1 - 0.2 / height, ha="left", va="top", fontsize=16, color=_INK)
    for place, chart in enumerate(pictured):
        axes = figure.add_subplot(lines, _COLUMNS, place + 1)
        axes.set_title(chart.title, loc="left", fontsize=11, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors="#666666", labelsize=9)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        if len(rows) == 1:
            axes.set_xlim(rows[0][ITERATION] - 1, rows[0][ITERATION] + 1)
        if place >= len(pictured) - _COLUMNS:
            axes.set_xlabel("iteration", fontsize=9, color="#666666")
        _draw(axes, rows, chart)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.75, labelcolor=_INK, loc="best")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _draw(axes: Axes, rows: Rows, chart: Chart) -> None:
    if chart.kind == "stacked":
        _stacked(axes, rows, chart.lines)
        return
    if chart.kind == "success":
        _success(axes, rows, chart.lines)
        return
    for line in chart.lines:
        _line(axes, rows, line)
    if chart.kind == "share":
        _as_share(axes)


def _success(axes: Axes, rows: Rows, lines: Sequence[Line]) -> None:
    """Held-out success is measured now and then: its points are joined, and its interval is a band."""
    at = _column(rows, ITERATION)
    for line in lines:
        if line.metric == SUCCESS:
            _line(axes, rows, line)
        elif line.metric in (HELD_OUT, GREEDY):
            value = _column(rows, line.metric)
            there = np.isfinite(value)
            sign = "o" if line.metric == HELD_OUT else "s"
            marker = sign if there.sum() < _MARKED_TO else ""
            axes.plot(at[there], value[there], color=line.colour, marker=marker, markersize=4, label=line.label)
        elif line.metric == HELD_OUT_HIGH:
            low, high = _column(rows, HELD_OUT_LOW), _column(rows, HELD_OUT_HIGH)
            bounded = np.isfinite(low) & np.isfinite(high)
            axes.fill_between(at[bounded], low[bounded], high[bounded], color=line.colour, alpha=0.18, linewidth=0)
    _as_share(axes)
    axes.set_ylim(bottom=-0.02, top=max(0.1, axes.get_ylim()[1]))


def _line(axes: Axes, rows: Rows, line: Line) -> None:
    at, value = _column(rows, ITERATION), _column(rows, line.metric)
    style, width = _STYLES[line.dash]
    marker = "." if len(at) < _MARKED_TO else ""
    if len(at) < _SMOOTHED_FROM:
        axes.plot(at, value, color=line.colour, linestyle=style, linewidth=width, marker=marker, label=line.label)
        return
    axes.plot(at, value, color=line.colour, linewidth=0.8, alpha=0.3)
    smooth = _running_mean(value, len(at) // 20)
    axes.plot(at, smooth, color=line.colour, linestyle=style, linewidth=width, label=line.label)


def _stacked(axes: Axes, rows: Rows, lines: Sequence[Line]) -> None:
    """The largest first."""
    at = _column(rows, ITERATION)
    seconds = [np.nan_to_num(_column(rows, line.metric), posinf=0.0, neginf=0.0) for line in lines]
    order = sorted(range(len(lines)), key=lambda i: -float(seconds[i].sum()))
    labels = [lines[i].label for i in order]
    colours = [lines[i].colour for i in order]
    if len(at) == 1:
        widths = [float(seconds[i][0]) for i in order]
        axes.barh(range(len(labels)), widths, color=colours, alpha=0.4)
        for place, label in enumerate(labels):
            axes.text(0.02 * max(widths), place, f"{label}  {widths[place]:.2f}", va="center", fontsize=9, color=_INK)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.05 * max(widths) or 1.0)
        axes.set_xlabel("seconds", fontsize=9, color="#666666")
        return
    if len(at) >= _SMOOTHED_FROM:
        seconds = [_running_mean(value, len(at) // 20) for value in seconds]
    axes.stackplot(at, [seconds[i] for i in order], labels=labels, colors=colours, alpha=0.85, linewidth=0)
    axes.margins(x=0)


def _as_share(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _column(rows: Rows, name: str) -> np.ndarray:
    """A metric by row; NaN where a row has none, or has infinity."""
    values = np.array([row.get(name, math.nan) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, math.nan)


def _running_mean(value: np.ndarray, reach: int) -> np.ndarray:
    """Mean over `reach` neighbours on either side, of those that are numbers; NaN where none is."""
    window = np.ones(2 * reach + 1)
    there = np.isfinite(value)
    total = np.convolve(np.where(there, value, 0.0), window, mode="same")
    count = np.convolve(there.astype(np.float64), window, mode="same")
    return np.divide(total, count, out=np.full_like(total, math.nan), where=count > 0.5)
