"""An iteration's figures: a card an agent, with how often it was called, and one a policy."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from dash import html

from infra.store.stored_iteration import StoredIteration
from infra.traces.visible import visible
from infra.ui.notices import notice
from infra.ui.run_reader import RunReader
from infra.ui.words import number, share
from mgrpo_core.errors import MGRPOError

_BARS = 12  # calls in a rollout, from which on they share a bar
_compute: Any = pc


def figures_section(reader: RunReader, stored: StoredIteration) -> list[Any]:
    """The cards; of what cannot be read, what is wrong with it."""
    _, iteration = stored.place
    faults: list[Any] = []
    try:
        metrics = reader.metrics(iteration)
    except (MGRPOError, ValueError) as error:
        metrics, faults = {}, [notice("The iteration's figures cannot be read", str(error), wrong=True)]
    cards = [_agent_card(reader, stored, agent, metrics) for agent in stored.config.agents]
    cards += [_policy_card(policy, stored, metrics) for policy in stored.manifest.policies]
    return [*faults, html.Div(cards, className="cards")]


def _agent_card(reader: RunReader, stored: StoredIteration, agent: str, metrics: dict[str, float]) -> html.Article:
    def of(metric: str) -> float | None:
        return metrics.get(f"{agent}/{metric}")

    lines = [("trajectories", number(of("trajectories"))), ("reward", number(of("reward")))]
    lines += [
        (part.replace("_", " "), number(of(part)))
        for part in ("format", "correct", "main_correct", "expert")
        if of(part) is not None
    ]
    lines += [
        ("groups without variance", share(of("zero_variance_groups"))),
        ("in the loss", number(of("included"))),
        ("lost, spoiled", f"{number(of('infra_failed'))}, {number(of('policy_failed'))}"),
        ("sampled tokens, mean", number(of("sampled_tokens_mean"))),
    ]
    calls = [] if agent == stored.config.main_agent else [_calls(reader, stored, agent)]
    return _card(f"agent {visible(agent)}", lines, calls)


def _policy_card(policy: str, stored: StoredIteration, metrics: dict[str, float]) -> html.Article:
    def of(metric: str) -> float | None:
        return metrics.get(f"update/{policy}/{metric}")

    step = stored.manifest.policies[policy]
    return _card(
        f"policy {visible(policy)}",
        [
            ("version", f"{step.from_version} → {step.to_version}"),
            ("loss", number(of("loss"))),
            ("gradient norm", number(of("grad_norm"))),
            ("KL of the update", number(of("approx_kl"))),
            ("clipped above, below", f"{share(of('clip_fraction_high'))}, {share(of('clip_fraction_low'))}"),
            ("mismatch, mean, most", f"{number(of('mismatch_mean'))}, {number(of('mismatch_max'))}"),
            ("effective sample share", number(of("effective_sample_share"))),
            ("entropy", number(of("entropy"))),
        ],
        [],
    )


def _card(title: str, lines: list[tuple[str, str]], more: list[Any]) -> html.Article:
    listed = [part for name, value in lines for part in (html.Dt(name), html.Dd(value))]
    return html.Article([html.H3(title), html.Dl(listed), *more], className="card")


def _calls(reader: RunReader, stored: StoredIteration, agent: str) -> html.Div:
    """How many rollouts called the agent how often."""
    counts = calls_per_rollout(reader.index(stored), agent)
    d, rollouts = stored.config.agents[agent].d, sum(counts.values())
    bars = Counter[int]()
    for calls, number_of_rollouts in counts.items():
        bars[min(calls, _BARS)] += number_of_rollouts
    most = max(bars.values(), default=1)
    rows = []
    for calls in range(max(bars, default=0) + 1):
        label = f"{calls}+" if calls == _BARS else str(calls)
        look = "bar beyond" if calls > d else "bar"
        rows += [
            html.Span(label, className="bar-name"),
            html.Div(
                html.Div(className=look, style={"width": f"{100 * bars[calls] / most:.1f}%"}), className="bar-room"
            ),
            html.Span(f"{bars[calls]:,}", className="bar-count"),
        ]
    title = f"calls in a rollout, d = {d}; of {rollouts:,} rollouts"
    return html.Div([html.H4(title), html.Div(rows, className="bars")], className="calls")


def calls_per_rollout(index: pa.Table, agent: str) -> dict[int, int]:
    """How many rollouts have so many trajectories of the agent, those without any included."""
    rollouts = index.group_by(["query_position", "rollout_index"]).aggregate([]).num_rows
    own = index.filter(_compute.equal(index["agent"], agent))
    calls = own.group_by(["query_position", "rollout_index"]).aggregate([([], "count_all")])["count_all"].to_pylist()
    counts = Counter(calls)
    if rollouts > len(calls):
        counts[0] = rollouts - len(calls)
    return dict(sorted(counts.items()))
