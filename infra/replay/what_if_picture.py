"""A what-if as one picture: a panel a figure, a group of bars a variation, a colour an agent or policy."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from infra.replay.what_if import Tried, WhatIf

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart with any colour vision
_INK = "#333333"
_Figure = Callable[[Any], float | None]
_CREDIT: dict[str, _Figure] = {
    "advantages that change sign (share)": lambda one: one.sign_changes / max(1, one.trajectories),
    "groups that gain signal (share)": lambda one: one.gained / max(1, one.groups),
    "groups that lose signal (share)": lambda one: one.lost / max(1, one.groups),
}
_UPDATE: dict[str, _Figure] = {
    "gradient: cosine with the run's": lambda one: one.cosine,
    "gradient norm / the run's": lambda one: one.norm / one.stored_norm if one.stored_norm else None,
    "KL from the run's update (nats a token)": lambda one: one.approx_kl,
}


def what_if_png(found: WhatIf) -> bytes:
    """Draw every figure that there is, as the bytes of a PNG."""
    rows = [(_CREDIT, "agents", "agent")]
    if any(tried.policies for tried in found.tried):
        rows.append((_UPDATE, "policies", "policy"))
    lines = max(len(_lines(tried)) for tried in found.tried)
    height = 1.2 + len(found.tried) * max(0.45, 0.17 * lines)
    figure = Figure(figsize=(15, 0.6 + height * len(rows)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Run {found.run}, iteration {found.iteration}: what if", fontsize=15, color=_INK)
    grid = figure.subplots(len(rows), 3, sharey=True, squeeze=False)
    for axes_3, (figures, part, name) in zip(grid, rows, strict=True):
        for axes, (title, value) in zip(axes_3, figures.items(), strict=True):
            _bars(axes, found.tried, lambda tried, part=part: getattr(tried, part), name, value)
            axes.set_title(title, fontsize=11, color=_INK)
        axes_3[0].legend(frameon=False, fontsize=9, ncols=6, loc="upper left", bbox_to_anchor=(0, -0.12))
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _bars(
    axes: Axes, tried: Sequence[Tried], parts: Callable[[Tried], Sequence[Any]], name: str, value: _Figure
) -> None:
    """A group of bars a variation, the first on top; a figure that there is not is an empty place."""
    names = [getattr(one, name) for one in parts(tried[0])]
    width = 0.8 / len(names)
    for index, label in enumerate(names):
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(tried))]
        lengths = [value(parts(one)[index]) or 0.0 for one in tried]
        axes.barh(places, lengths, width, label=label, color=_COLOURS[index % len(_COLOURS)])
    axes.set_yticks(range(len(tried)), ["\n".join(_lines(one)) for one in tried], fontsize=9)
    axes.set_ylim(len(tried) - 0.5, -0.5)
    longest = max(abs(edge) for edge in axes.dataLim.intervalx)
    axes.set_xlim(min(0.0, axes.dataLim.x0 * 1.05), 1.05 * longest if longest else 1.0)
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(tried: Tried) -> list[str]:
    """A variation's changes, each by the last part of its key; a dollar sign is no mathematics."""
    return [
        f"{key.rpartition('.')[2]}={value}".replace("$", r"\$")
        for key, _, value in (change.partition("=") for change in tried.changes)
    ]
