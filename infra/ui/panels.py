"""The charts of the overview: which numbers of an iteration stand together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.traces.visible import visible
from infra.tracking.curves import HELD_OUT, ITERATION, SECONDS, SUCCESS

Rows = Sequence[Mapping[str, float]]

# Okabe and Ito: told apart with any colour vision. Their black is left out: it is not seen on a dark page.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A8C00", "#7F7F7F")
_COMPONENTS = ("reward", "format", "correct", "main_correct", "expert")
_GREY, _GRID = "#808893", "rgba(128,136,147,0.2)"
_REWARD, _UPDATE = "/reward", "update/"
_TICKS = 8
_MARKED_TO = 40  # points, up to which each is marked


@dataclass(frozen=True, slots=True)
class Line:
    """A metric over iterations."""

    metric: str
    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart.

    Attributes:
        explanation: what to look for, in a line.
        kind: `share` has percent on its axis, `log` a logarithmic one, `stacked` adds up.
    """

    title: str
    explanation: str
    lines: tuple[Line, ...]
    kind: str = "plain"


def panels(rows: Rows) -> list[Panel]:
    """Charts for which the rows have a number, in the order in which one reads them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    agents, policies = agents_in(names), policies_in(names)
    colours = {
        owner: _COLOURS[place % len(_COLOURS)] for place, owner in enumerate(dict.fromkeys([*agents, *policies]))
    }

    def of(owners: Sequence[str], metric: str, words: str = "{}", dash: str = "solid") -> list[Line]:
        return [Line(metric.format(one), words.format(one), colours[one], dash) for one in owners]

    success = [
        Line(SUCCESS, "training", _COLOURS[0]),
        Line(HELD_OUT, "held out", _COLOURS[1]),
        Line(f"{HELD_OUT}_low", "held out, 95 % from", _COLOURS[1], "dot"),
        Line(f"{HELD_OUT}_high", "held out, 95 % to", _COLOURS[1], "dot"),
        Line("held_out/greedy", "held out, greedy", _COLOURS[2]),
    ]
    found = [Panel("Success", "Share of questions answered right, in the right form.", tuple(success), "share")]
    for agent in agents:
        parts = tuple(
            Line(f"{agent}/{part}", part.replace("_", " "), _COLOURS[place], "solid" if part == "reward" else "dot")
            for place, part in enumerate(_COMPONENTS)
        )
        found.append(Panel(f"Reward of {agent}", "Mean reward, and of the parts that it is made of.", parts))
    stages = [name for name in names if name.startswith(SECONDS)]
    found += [
        Panel(
            "Calls in a rollout, d_k",
            "Delegations to a sub-agent in a rollout: mean and most.",
            (*of(agents, "{}/invocations_mean", "{}, mean"), *of(agents, "{}/invocations_max", "{}, most", "dot")),
        ),
        Panel(
            "Rollouts without a call, or beyond d",
            "Beyond d, calls are dropped by alignment.",
            (
                *of(agents, "{}/rollouts_without", "{}, none"),
                *of(agents, "{}/rollouts_beyond_d", "{}, beyond d", "dot"),
            ),
            "share",
        ),
        Panel(
            "Groups without variance",
            "Their rewards are all equal, so nothing is learned from them.",
            tuple(of(agents, "{}/zero_variance_groups")),
            "share",
        ),
        Panel(
            "Sampled tokens a trajectory",
            "Mean length of what a policy wrote.",
            tuple(of(agents, "{}/sampled_tokens_mean")),
        ),
        Panel("Turns a trajectory", "Mean number of generations.", tuple(of(agents, "{}/turns_mean"))),
        Panel(
            "Lost and spoiled trajectories",
            "Lost to infrastructure, or spoiled by the policy.",
            (*of(agents, "{}/infra_failed", "{}, lost"), *of(agents, "{}/policy_failed", "{}, spoiled", "dot")),
        ),
        Panel(
            "KL",
            "Nats a token: of the update, and to the reference policy.",
            (
                *of(policies, "update/{}/approx_kl", "{}, update"),
                *of(policies, "update/{}/ref_kl", "{}, reference", "dot"),
            ),
        ),
        Panel(
            "Clipped tokens",
            "Share of tokens at which a bound of the clip binds.",
            (
                *of(policies, "update/{}/clip_fraction_high", "{}, above"),
                *of(policies, "update/{}/clip_fraction_low", "{}, below", "dot"),
            ),
            "share",
        ),
        Panel(
            "Mismatch of trainer and sampler",
            "Difference of log-probs, nats: mean and largest. Beyond 0.05 in float32, look into it.",
            (
                *of(policies, "update/{}/mismatch_mean", "{}, mean"),
                *of(policies, "update/{}/mismatch_max", "{}, most", "dot"),
            ),
            "log",
        ),
        Panel(
            "Effective sample share",
            "1 where sampler and trainer agree.",
            tuple(of(policies, "update/{}/effective_sample_share")),
        ),
        Panel("Entropy", "Nats a token. A fall to 0 means one answer only.", tuple(of(policies, "update/{}/entropy"))),
        Panel("Gradient norm", "Before clipping.", tuple(of(policies, "update/{}/grad_norm"))),
        Panel(
            "Seconds of each stage",
            "Stages overlap, so their sum is more than the wall's clock.",
            tuple(
                Line(name, name.removeprefix(SECONDS).replace("_", " "), _COLOURS[place % len(_COLOURS)])
                for place, name in enumerate(stages)
            ),
            "stacked",
        ),
    ]
    drawn = (
        Panel(one.title, one.explanation, tuple(line for line in one.lines if _says_something(rows, line)), one.kind)
        for one in found
    )
    return [one for one in drawn if one.lines]


def agents_in(names: Iterable[str]) -> list[str]:
    """The agents that metrics are of."""
    return [name.removesuffix(_REWARD) for name in names if name.endswith(_REWARD)]


def policies_in(names: Iterable[str]) -> list[str]:
    """The policies that updates are of; a name may have slashes."""
    updates = (name.removeprefix(_UPDATE) for name in names if name.startswith(_UPDATE))
    return list(dict.fromkeys(name.rpartition("/")[0] for name in updates))


def figure(panel: Panel, rows: Rows) -> dict[str, Any]:
    """A chart in Plotly's form; values that are missing are gaps."""
    mode = "lines+markers" if len(rows) <= _MARKED_TO else "lines"
    data: list[dict[str, Any]] = []
    for line in panel.lines:
        there = [(row[ITERATION], row[line.metric]) for row in rows if ITERATION in row and line.metric in row]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": mode,
            "name": visible(line.label).replace("<", "&lt;"),  # Plotly knows some markup in names
            "x": [at for at, _ in there],
            "y": [float(f"{value:.6g}") for _, value in there],
            "line": {"color": line.colour, "dash": line.dash, "width": 2 if line.dash == "solid" else 1.5},
            "marker": {"size": 5},
        }
        if panel.kind == "stacked":
            trace |= {"stackgroup": "one", "mode": "lines", "line": {"color": line.colour, "width": 0.5}}
        data.append(trace)
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    value_axis: dict[str, Any] = {**axis, "rangemode": "tozero"}
    if panel.kind == "share":
        value_axis |= {"tickformat": ".3~p"}
    if panel.kind == "log":
        value_axis |= {"type": "log", "exponentformat": "power"}
    legend: dict[str, Any] = {"orientation": "h", "y": -0.14, "yanchor": "top", "x": 0, "font": {"size": 10.5}}
    if panel.kind == "stacked":
        legend = {"font": {"size": 10.5}}
    numbers = {row[ITERATION] for row in rows if ITERATION in row}
    return {
        "data": data,
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": _GREY, "size": 11, "family": "system-ui, sans-serif"},
            "margin": {"l": 44, "r": 10, "t": 6, "b": 26 if panel.kind == "stacked" else 64},
            "height": 260,
            "xaxis": {**axis, "rangemode": "nonnegative", "tickformat": ",d", "nticks": 8}
            | ({"dtick": 1} if max(numbers, default=0) < _TICKS else {}),
            "yaxis": value_axis,
            "showlegend": len(data) > 1,
            "legend": legend,
            "hovermode": "x unified",
            "hoverlabel": {"namelength": -1},
            "uirevision": panel.title,
        },
    }


def _says_something(rows: Rows, line: Line) -> bool:
    """Whether it has a number; a KL to a reference that there is not is 0 throughout."""
    values = [row[line.metric] for row in rows if line.metric in row]
    return any(values) if line.metric.endswith("/ref_kl") else bool(values)
