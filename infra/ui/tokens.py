"""A trajectory's tokens, coloured by log-prob, advantage or loss mask; pointing at one says its id and numbers."""

import math
from typing import Any

import numpy as np
from dash import dcc, html

from infra.store.stored_iteration import StoredIteration
from infra.traces.rollout import TraceNode
from infra.traces.visible import visible
from infra.ui.addresses import RolloutPage, Shown, View
from infra.ui.notices import notice
from infra.ui.run_reader import RunReader
from infra.ui.words import signed

TOKENS_AT_ONCE = 1500
_STEPS = 9  # shades
_FAINTEST, _STRONGEST = 0.0, 6.0  # nats below 0: probability 1 to 0.0025
_STRONG_ADVANTAGE = 2.0  # standard deviations of a group


def tokens_view(
    reader: RunReader, stored: StoredIteration, node: TraceNode, page: RolloutPage, shown: Shown
) -> html.Div:
    """One page of the tokens, with a legend."""
    one = node.trajectory
    total = len(one.token_ids)
    if not total:
        return html.Div(notice("No token", "The trajectory ended before its prompt was made."))
    start = min(shown.start, (total - 1) // TOKENS_AT_ONCE * TOKENS_AT_ONCE)
    stop = min(start + TOKENS_AT_ONCE, total)
    ids = one.token_ids[start:stop].tolist()
    texts = reader.token_texts.texts(stored, one.policy, ids)
    advantage = node.advantage.advantage if node.advantage and node.advantage.included else None
    spans = [
        html.Span(
            f"‹{token}›" if texts is None else _seen(texts[place]),
            className=f"token {_look(shown.view, sampled, logprob, advantage)}",
            title=_said(start + place, token, sampled, logprob, advantage),
        )
        for place, (token, sampled, logprob) in enumerate(
            zip(ids, one.loss_mask[start:stop].tolist(), one.logprobs[start:stop].tolist(), strict=True)
        )
    ]
    parts: list[Any] = [_legend(shown.view, advantage, node)]
    if texts is None:
        reason = (
            f"The version of policy {one.policy!r} that sampled these has no tokenizer in the store that can be read."
        )
        parts.append(notice("Ids only", reason))
    parts.append(html.Div(spans, className="tokens", id="tokens"))
    if total > TOKENS_AT_ONCE:
        parts.append(_pager(page, shown, start, stop, total))
    return html.Div(parts)


def _seen(text: str) -> str:
    return visible(text).replace("\n", "⏎\n") or "∅"


def _look(view: View, sampled: bool, logprob: float, advantage: float | None) -> str:
    if not sampled:
        return "given"
    if view == "mask":
        return "sampled"
    if view == "advantage":
        if not advantage:
            return "sampled-flat"
        depth = math.ceil(min(abs(advantage) / _STRONG_ADVANTAGE, 1.0) * _STEPS)
        return f"{'good' if advantage > 0 else 'bad'}-{depth}"
    if not math.isfinite(logprob):
        return "unknown"
    depth = round(float(np.clip((-logprob - _FAINTEST) / (_STRONGEST - _FAINTEST), 0, 1)) * _STEPS)
    return f"rare-{depth}"


def _said(offset: int, token: int, sampled: bool, logprob: float, advantage: float | None) -> str:
    if not sampled:
        return f"token {offset}, id {token}\ngiven, not sampled: outside the loss"
    prob = f"log-prob {logprob:.4f}, probability {math.exp(logprob):.3g}" if math.isfinite(logprob) else "no log-prob"
    credit = "in no loss" if advantage is None else f"advantage {signed(advantage)}"
    return f"token {offset}, id {token}\nsampled, {prob}\n{credit}"


def _legend(view: View, advantage: float | None, node: TraceNode) -> html.P:
    def sample(look: str, words: str) -> html.Span:
        return html.Span(words, className=f"token {look}")

    if view == "mask":
        entries = [sample("sampled", "sampled by the policy, in the loss"), sample("given", "given: prompt, replies")]
    elif view == "advantage":
        why = (node.advantage and node.advantage.excluded_reason) or "no row in the advantages table"
        words = (
            f"not in the loss: {visible(why)}"
            if advantage is None
            else f"advantage {signed(advantage)} on each sampled token"
        )
        entries = [sample(_look(view, True, 0.0, advantage), words), sample("given", "given")]
    else:
        shades = [sample(f"rare-{depth}", f"{-depth * _STRONGEST / _STEPS:.1f}") for depth in range(0, _STEPS + 1, 3)]
        entries = [html.Span("log-prob, nats:"), *shades, sample("unknown", "none stored"), sample("given", "given")]
    return html.P(entries, className="legend")


def _pager(page: RolloutPage, shown: Shown, start: int, stop: int, total: int) -> html.Nav:
    def link(words: str, to: int, there: bool) -> Any:
        return dcc.Link(words, href=page.path + shown.but(start=to).search) if there else html.Span(words)

    return html.Nav(
        [
            link("← before", max(0, start - TOKENS_AT_ONCE), start > 0),
            html.Span(f"tokens {start:,} to {stop - 1:,} of {total:,}", className="quiet"),
            link("after →", stop, stop < total),
        ],
        className="steps",
    )
