"""The curves of a run as one picture: is it learning, from what, and at what cost."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mgrpo_core.errors import ShapeError

Rows = Sequence[Mapping[str, float]]
"""One mapping an iteration, with `iteration` and any of the metrics that the panels know; the rest is ignored."""

ITERATION = "iteration"
SUCCESS = "success"
HELD_OUT = "held_out/success"
"""With `held_out/success_low` and `_high`, the ends of its confidence interval, and `held_out/greedy`."""
SECONDS = "seconds/"
"""Prefix of the time of each stage."""

# Okabe and Ito: told apart with any colour vision, and in this order with neighbours far apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_INK, _GRID = "#333333", "#E6E6E6"
_COMPONENTS = ("reward", "format", "correct", "main_correct", "expert")
_COLUMNS = 3
_MARKED_TO = 30  # points, up to which each is marked
_SMOOTHED_FROM = 60  # iterations from which single ones are noise to the eye

_Panel = Callable[[Axes], None]


def curves_png(rows: Rows, title: str) -> bytes:
    """Draw every panel for which the rows have numbers, as the bytes of a PNG about 1,500 pixels wide.

    Success (train, held out with its interval), reward components of each agent, delegations d_k, groups without
    variance, sampled tokens, approximate KL and KL to the reference, clip fractions, entropy, gradient norm, seconds of
    each stage. A value that is missing, NaN or infinite is a gap. From 60 iterations on, single ones are drawn faint
    under their running mean.

    Raises: ShapeError if no row has both an iteration and a number that a panel draws.
    """
    rows = sorted((row for row in rows if ITERATION in row), key=lambda row: row[ITERATION])
    panels = _panels(rows)
    if not panels:
        raise ShapeError(
            f"curves of {title!r}: {len(rows)} rows with an {ITERATION!r}, none with a metric to draw such as "
            f"{SUCCESS!r} or 'main/reward'. Pass the metrics of at least one committed iteration."
        )
    lines = math.ceil(len(panels) / _COLUMNS)
    height = 1.1 + 3.4 * lines
    figure = Figure(figsize=(15, height), dpi=100)
    FigureCanvasAgg(figure)
    # Margins in inches, the same for every picture: a layout engine draws everything several times to find its own.
    edges = {"left": 0.8 / 15, "right": 1 - 0.2 / 15, "bottom": 0.6 / height, "top": 1 - 0.95 / height}
    figure.subplots_adjust(**edges, wspace=0.24, hspace=0.3)
    figure.suptitle(title, x=0.2 / 15, y=1 - 0.2 / height, ha="left", va="top", fontsize=16, color=_INK)
    for place, (name, draw) in enumerate(panels):
        axes = figure.add_subplot(lines, _COLUMNS, place + 1)
        axes.set_title(name, loc="left", fontsize=11, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors="#666666", labelsize=9)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        if len(rows) == 1:
            axes.set_xlim(rows[0][ITERATION] - 1, rows[0][ITERATION] + 1)
        if place >= len(panels) - _COLUMNS:
            axes.set_xlabel("iteration", fontsize=9, color="#666666")
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.75, labelcolor=_INK, loc="best")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _panels(rows: Rows) -> list[tuple[str, _Panel]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    agents = [name.removesuffix("/reward") for name in names if name.endswith("/reward") and name.count("/") == 1]
    policies = list(dict.fromkeys(name.split("/")[1] for name in names if name.startswith("update/")))
    colour = {owner: _COLOURS[i % len(_COLOURS)] for i, owner in enumerate(dict.fromkeys([*agents, *policies]))}
    wanted: list[tuple[str, Iterable[str], _Panel]] = [
        ("Success", (SUCCESS, HELD_OUT, "held_out/greedy"), lambda axes: _success(axes, rows)),
    ]
    for agent in agents:
        components = [f"{agent}/{component}" for component in _COMPONENTS if f"{agent}/{component}" in names]

        def draw_rewards(axes: Axes, components: Sequence[str] = components) -> None:
            for i, name in enumerate(components):
                width = 2.4 if i == 0 else 1.4
                _line(axes, rows, name, name.split("/")[1].replace("_", " "), _COLOURS[i], width=width)

        wanted.append((f"Reward of {agent}", components, draw_rewards))

    def of(owners: Sequence[str], pattern: str, label: str = "{}", style: str = "-") -> list[tuple[str, str, str, str]]:
        return [(pattern.format(owner), label.format(owner), colour[owner], style) for owner in owners]

    for title, lines, share in (
        (
            "Delegations a rollout, d_k",
            of(agents, "{}/invocations_mean", "{}, mean") + of(agents, "{}/invocations_max", "{}, most", ":"),
            False,
        ),
        ("Groups without variance (no signal)", of(agents, "{}/zero_variance_groups"), True),
        ("Sampled tokens a trajectory", of(agents, "{}/sampled_tokens_mean"), False),
        (
            "KL, nats a token",
            of(policies, "update/{}/approx_kl", "{}, of the update") + _unless_zero(rows, of, policies),
            False,
        ),
        (
            "Clipped tokens",
            of(policies, "update/{}/clip_fraction_high", "{}, above")
            + of(policies, "update/{}/clip_fraction_low", "{}, below", "--"),
            True,
        ),
        ("Entropy, nats a token", of(policies, "update/{}/entropy"), False),
        ("Gradient norm before clipping", of(policies, "update/{}/grad_norm"), False),
    ):

        def draw_lines(axes: Axes, lines: Sequence[tuple[str, str, str, str]] = lines, share: bool = share) -> None:
            for name, label, line_colour, style in lines:
                _line(axes, rows, name, label, line_colour, style=style)
            if share:
                _as_share(axes)

        wanted.append((title, [line[0] for line in lines], draw_lines))
    stages = [name for name in names if name.startswith(SECONDS)]
    wanted.append(("Seconds an iteration", stages, lambda axes: _stacked(axes, rows, stages)))
    return [(title, draw) for title, needs, draw in wanted if any(_drawn(rows, name) for name in needs)]


def _unless_zero(
    rows: Rows, of: Callable[..., list[tuple[str, str, str, str]]], policies: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """KL to the reference policy, where there is one: without, it is 0 throughout and only crowds the panel."""
    with_reference = [p for p in policies if np.nansum(np.abs(_column(rows, f"update/{p}/ref_kl"))) > 0]
    return of(with_reference, "update/{}/ref_kl", "{}, to reference", "--")


def _success(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, SUCCESS, "train", _COLOURS[0])
    at = _column(rows, ITERATION)
    held_out, low, high = (_column(rows, HELD_OUT + end) for end in ("", "_low", "_high"))
    there = np.isfinite(held_out)
    if there.any():
        marker = "o" if there.sum() < _MARKED_TO else ""
        axes.plot(at[there], held_out[there], color=_COLOURS[1], linewidth=2, marker=marker, label="held out")
        bounded = there & np.isfinite(low) & np.isfinite(high)
        axes.fill_between(at[bounded], low[bounded], high[bounded], color=_COLOURS[1], alpha=0.18, linewidth=0)
    greedy = _column(rows, "held_out/greedy")
    there = np.isfinite(greedy)
    if there.any():
        marker = "s" if there.sum() < _MARKED_TO else ""
        axes.plot(at[there], greedy[there], color=_COLOURS[2], marker=marker, markersize=4, label="held out, greedy")
    _as_share(axes)
    axes.set_ylim(bottom=-0.02, top=max(0.1, axes.get_ylim()[1]))


def _line(axes: Axes, rows: Rows, name: str, label: str, colour: str, *, style: str = "-", width: float = 1.8) -> None:
    if not _drawn(rows, name):
        return
    at, value = _column(rows, ITERATION), _column(rows, name)
    marker = "." if len(at) < _MARKED_TO else ""
    if len(at) < _SMOOTHED_FROM:
        axes.plot(at, value, color=colour, linestyle=style, linewidth=width, marker=marker, label=label)
        return
    axes.plot(at, value, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(at, _running_mean(value, len(at) // 20), color=colour, linestyle=style, linewidth=width, label=label)


def _stacked(axes: Axes, rows: Rows, stages: Sequence[str]) -> None:
    at = _column(rows, ITERATION)
    seconds = [np.nan_to_num(_column(rows, name), posinf=0.0, neginf=0.0) for name in stages]
    order = sorted(range(len(stages)), key=lambda i: -float(seconds[i].sum()))
    labels = [stages[i].removeprefix(SECONDS).replace("_", " ") for i in order]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(stages))]
    if len(at) == 1:
        widths = [float(seconds[i][0]) for i in order]
        axes.barh(range(len(labels)), widths, color=colours, alpha=0.4)
        for line, label in enumerate(labels):
            axes.text(0.02 * max(widths), line, f"{label}  {widths[line]:.2f}", va="center", fontsize=9, color=_INK)
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


def _drawn(rows: Rows, name: str) -> bool:
    return bool(np.isfinite(_column(rows, name)).any())


def _running_mean(value: np.ndarray, reach: int) -> np.ndarray:
    """Mean over `reach` neighbours on either side, of those that are numbers; NaN where none is."""
    window = np.ones(2 * reach + 1)
    there = np.isfinite(value)
    total = np.convolve(np.where(there, value, 0.0), window, mode="same")
    count = np.convolve(there.astype(np.float64), window, mode="same")
    return np.divide(total, count, out=np.full_like(total, math.nan), where=count > 0.5)
