"""A trajectory's tokens as a terminal shows them: what was given, what was sampled, and how likely it was."""

import math
from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from infra.traces.visible import visible
from mgrpo_core.trajectories import Trajectory

_GIVEN = Style(dim=True)
_UNKNOWN = Style(color="magenta", underline=True)
_SCALE = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Least probability, colour."""

_MOST = 400


def legend(coloured: bool) -> Text:
    """What the colours say."""
    if not coloured:
        return Text("Sampled tokens stand in ‹›, with their log-probs in nats; all else was given.")
    text = Text("Sampled with probability ")
    words = [(f"≥ {least:g}" if least else "below", Style(color=colour, underline=True)) for least, colour in _SCALE]
    for word, style in words:
        text.append(word, style).append(" ")
    return text.append("no log-prob", _UNKNOWN).append(" ").append("given", _GIVEN)


def token_text(one: Trajectory, texts: Sequence[str] | None, *, full: bool, coloured: bool) -> Text:
    """Its tokens, one after the other.

    Args:
        one: with its token arrays.
        texts: of each token; None where there is no tokenizer: ids are shown.
        full: all of them; else the first of a long stream.
        coloured: whether the terminal has colours; without, sampled tokens are marked and their log-probs written.
    """
    count = len(one.token_ids) if full else min(_MOST, len(one.token_ids))
    starts = set(one.segment_starts[1:])
    shown = Text()
    for place in range(count):
        if place in starts:
            shown.append("\n— the template rewrote history: a new context —\n", style="yellow")
        said = f"<{one.token_ids[place]}>" if texts is None else visible(texts[place]) or "<>"
        if not one.loss_mask[place]:
            shown.append(said, _GIVEN)
            continue
        logprob = float(one.logprobs[place])
        if coloured:
            shown.append(said, _style(logprob))
        else:
            shown.append(f"‹{said} {logprob:.2f}›" if math.isfinite(logprob) else f"‹{said}›")
    if count < len(one.token_ids):
        shown.append(f" … {len(one.token_ids) - count:,} more tokens: --full", style="dim italic")
    return shown


def _style(logprob: float) -> Style:
    if not math.isfinite(logprob):
        return _UNKNOWN
    probability = math.exp(min(logprob, 0.0))
    return Style(color=next(colour for least, colour in _SCALE if probability >= least), underline=True)
