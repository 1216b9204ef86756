"""The charts of a run: which numbers of an iteration stand together, in its picture and on its pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Rows = Sequence[Mapping[str, float]]
"""One mapping an iteration, with `iteration` and any of the metrics that the charts know; the rest is ignored."""

ITERATION = "iteration"
SUCCESS = "success"
HELD_OUT = "held_out/success"
HELD_OUT_LOW, HELD_OUT_HIGH = f"{HELD_OUT}_low", f"{HELD_OUT}_high"
"""The ends of its confidence interval."""
GREEDY = "held_out/greedy"
SECONDS = "seconds/"
"""Prefix of the time of each stage."""

# Okabe and Ito: told apart with any colour vision. Their black is left out: it is not seen on a dark page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A8C00", "#7F7F7F")
_COMPONENTS = ("reward", "format", "correct", "main_correct", "expert")
_REWARD, _UPDATE = "/reward", "update/"

Dash = Literal["solid", "dot"]


@dataclass(frozen=True, slots=True)
class Line:
    """A metric over iterations."""

    metric: str
    label: str
    colour: str
    dash: Dash = "solid"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        explanation: what to look for, in a line.
        kind: `share` has percent on its axis, `success` too, `log` a logarithmic one, `stacked` adds up.
        pictured: the picture has it too; a page has room for more.
    """

    title: str
    explanation: str
    lines: tuple[Line, ...]
    kind: Literal["plain", "share", "success", "log", "stacked"] = "plain"
    pictured: bool = True


def charts(rows: Rows) -> list[Chart]:
    """Charts for which the rows have a number, in the order in which one reads them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    drawn = (
        replace(one, lines=tuple(line for line in one.lines if _says_something(rows, line))) for one in _known(names)
    )
    return [one for one in drawn if one.lines]


def agents_in(names: Iterable[str]) -> list[str]:
    """The agents that metrics are of; a name may have slashes."""
    return [name.removesuffix(_REWARD) for name in names if name.endswith(_REWARD)]


def policies_in(names: Iterable[str]) -> list[str]:
    """The policies that updates are of; a name may have slashes."""
    updates = (name.removeprefix(_UPDATE) for name in names if name.startswith(_UPDATE))
    return list(dict.fromkeys(name.rpartition("/")[0] for name in updates))


def _known(names: Sequence[str]) -> list[Chart]:
    agents, policies = agents_in(names), policies_in(names)
    colours = {owner: _colour(place) for place, owner in enumerate(dict.fromkeys([*agents, *policies]))}

    def of(owners: Sequence[str], metric: str, words: str = "{}", dash: Dash = "solid") -> list[Line]:
        return [Line(metric.format(one), words.format(one), colours[one], dash) for one in owners]

    success = (
        Line(SUCCESS, "training", COLOURS[0]),
        Line(HELD_OUT, "held out", COLOURS[1]),
        Line(HELD_OUT_LOW, "held out, 95 % from", COLOURS[1], "dot"),
        Line(HELD_OUT_HIGH, "held out, 95 % to", COLOURS[1], "dot"),
        Line(GREEDY, "held out, greedy", COLOURS[2]),
    )
    stages = [name for name in names if name.startswith(SECONDS)]
    return [
        Chart("Success", "Share of questions answered right, in the right form.", success, "success"),
        *(
            Chart(
                f"Reward of {agent}",
                "Mean reward, and of the parts that it is made of.",
                tuple(
                    Line(f"{agent}/{part}", part.replace("_", " "), _colour(place), "dot" if place else "solid")
                    for place, part in enumerate(_COMPONENTS)
                ),
            )
            for agent in agents
        ),
        Chart(
            "Calls in a rollout, d_k",
            "Delegations to a sub-agent in a rollout: mean and most.",
            (*of(agents, "{}/invocations_mean", "{}, mean"), *of(agents, "{}/invocations_max", "{}, most", "dot")),
        ),
        Chart(
            "Rollouts without a call, or beyond d",
            "Beyond d, calls are dropped by alignment.",
            (
                *of(agents, "{}/rollouts_without", "{}, none"),
                *of(agents, "{}/rollouts_beyond_d", "{}, beyond d", "dot"),
            ),
            "share",
            pictured=False,
        ),
        Chart(
            "Groups without variance",
            "Their rewards are all equal, so nothing is learned from them.",
            tuple(of(agents, "{}/zero_variance_groups")),
            "share",
        ),
        Chart(
            "Sampled tokens a trajectory",
            "Mean length of what a policy wrote.",
            tuple(of(agents, "{}/sampled_tokens_mean")),
        ),
        Chart("Turns a trajectory", "Mean number of generations.", tuple(of(agents, "{}/turns_mean")), pictured=False),
        Chart(
            "Lost and spoiled trajectories",
            "Lost to infrastructure, or spoiled by the policy.",
            (*of(agents, "{}/infra_failed", "{}, lost"), *of(agents, "{}/policy_failed", "{}, spoiled", "dot")),
            pictured=False,
        ),
        Chart(
            "KL, nats a token",
            "Of the update, and to the reference policy.",
            (
                *of(policies, "update/{}/approx_kl", "{}, update"),
                *of(policies, "update/{}/ref_kl", "{}, reference", "dot"),
            ),
        ),
        Chart(
            "Clipped tokens",
            "Share of tokens at which a bound of the clip binds.",
            (
                *of(policies, "update/{}/clip_fraction_high", "{}, above"),
                *of(policies, "update/{}/clip_fraction_low", "{}, below", "dot"),
            ),
            "share",
        ),
        Chart(
            "Mismatch of trainer and sampler",
            "Difference of log-probs, nats: mean and largest. Beyond 0.05 in float32, look into it.",
            (
                *of(policies, "update/{}/mismatch_mean", "{}, mean"),
                *of(policies, "update/{}/mismatch_max", "{}, most", "dot"),
            ),
            "log",
            pictured=False,
        ),
        Chart(
            "Effective sample share",
            "1 where sampler and trainer agree.",
            tuple(of(policies, "update/{}/effective_sample_share")),
            pictured=False,
        ),
        Chart("Entropy, nats a token", "A fall to 0 means one answer only.", tuple(of(policies, "update/{}/entropy"))),
        Chart(
            "Gradient norm before clipping",
            "L2, mean over the update's steps.",
            tuple(of(policies, "update/{}/grad_norm")),
        ),
        Chart(
            "Seconds of each stage",
            "Stages overlap, so their sum is more than the wall's clock.",
            tuple(
                Line(name, name.removeprefix(SECONDS).replace("_", " "), _colour(place))
                for place, name in enumerate(stages)
            ),
            "stacked",
        ),
    ]


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _says_something(rows: Rows, line: Line) -> bool:
    """Whether it has a number; a KL to a reference that there is not is 0 throughout."""
    values = [row[line.metric] for row in rows if math.isfinite(row.get(line.metric, math.nan))]
    return any(values) if line.metric.endswith("/ref_kl") else bool(values)
