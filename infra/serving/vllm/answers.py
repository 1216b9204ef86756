"""Reads a vLLM server's answers. Whatever is wrong with one is named here, before anything computes with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from infra.serving.vllm.failures import ServerFailedError, ServerUnfitError
from mgrpo_core.trajectories import FinishReason

# What vLLM sends for a log-prob that is NaN, -inf or missing: JSON has no word for these.
_FLOOR = -9999.0
_FINISHED = ("stop", "length")


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One completion.

    Attributes:
        logprobs: NaN where the server had none for a token.
        labels: of the weights that made the tokens, in their order, without repetition.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server says that it serves."""

    names: tuple[str, ...]
    context: int | None


def completion_of(answer: Any, url: str) -> SampledTokens:
    """The one completion in an answer of `/inference/v1/generate`.

    Raises:
        ServerFailedError: the server gave the request up.
        ServerUnfitError: the answer lacks something, or does not fit together.
    """
    choice = _only_choice(answer, url)
    reason = choice.get("finish_reason")
    if reason == "abort":
        raise ServerFailedError(f"{url}: gave the request up (finish reason abort), as a server does that is paused.")
    if reason not in _FINISHED:
        raise ServerUnfitError(f"{url}: finish reason {reason!r}, expected one of {', '.join(_FINISHED)}.")
    ids = choice.get("token_ids")
    if not _is_list_of_ids(ids) or not ids:
        raise ServerUnfitError(f"{url}: no token ids in the answer ({_short(ids)}), expected at least one integer.")
    return SampledTokens(
        np.asarray(ids, dtype=np.int32),
        _logprobs_of(choice.get("logprobs"), cast("Sequence[int]", ids), url),
        cast("FinishReason", reason),
        _labels_of(choice.get("weight_versions"), len(ids), url),
    )


def card_of(answer: Any, url: str) -> ModelCard:
    """The answer of `/v1/models`. Raises: ServerUnfitError where it is none."""
    try:
        models = [model for model in answer["data"] if isinstance(model["id"], str)]
        lengths = [model["max_model_len"] for model in models if isinstance(model.get("max_model_len"), int)]
    except (TypeError, KeyError, AttributeError):
        raise ServerUnfitError(f"{url}: its /v1/models is no list of models ({_short(answer)}). Is it vLLM?") from None
    return ModelCard(tuple(model["id"] for model in models), min(lengths, default=None))


def field_of(answer: Any, name: str, kind: type, url: str) -> Any:
    """A field of a small answer. Raises: ServerUnfitError where it is missing or of another kind."""
    value = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(value, kind):
        raise ServerUnfitError(f"{url}: no {name!r} in its answer ({_short(answer)}). Run the vLLM of `make vllm`.")
    return value


def _only_choice(answer: Any, url: str) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise ServerUnfitError(f"{url}: expected one completion, got {_short(choices or answer)}.")
    return choices[0]


def _logprobs_of(raw: Any, ids: Sequence[int], url: str) -> np.ndarray:
    content = raw.get("content") if isinstance(raw, Mapping) else None
    if not isinstance(content, list):
        raise ServerUnfitError(
            f"{url}: no log-probs in the answer, although they were asked for. Start the server with `mgrpo serve`."
        )
    if len(content) != len(ids):
        raise ServerUnfitError(f"{url}: {len(ids)} token ids and {len(content)} log-probs, expected one an id.")
    values = np.full(len(ids), np.nan, dtype=np.float32)
    for place, (token_id, entry) in enumerate(zip(ids, content, strict=True)):
        if not isinstance(entry, Mapping) or entry.get("token_id") != token_id:
            raise ServerUnfitError(
                f"{url}: log-prob {place} is of {_short(entry)}, but token {place} is {token_id}. Ids and log-probs "
                "are shifted against each other."
            )
        value = entry.get("logprob")
        if isinstance(value, int | float) and math.isfinite(value) and value > _FLOOR:
            values[place] = value
    if np.isnan(values).all():
        raise ServerUnfitError(
            f"{url}: none of the {len(ids)} log-probs is a number (None, NaN or {_FLOOR:g}). The weights of this "
            "version are broken, or the server computes in a precision that overflows."
        )
    return values


def _labels_of(spans: Any, tokens: int, url: str) -> tuple[str, ...]:
    try:
        ordered = [(span["start"], span["end"], str(span["version"])) for span in spans]
    except (TypeError, KeyError):
        ordered = []
    if not ordered or ordered[0][0] != 0 or ordered[-1][1] < tokens:
        raise ServerUnfitError(
            f"{url}: does not say which weights made the tokens (weight_versions {_short(spans)}). It needs vLLM 0.32 "
            "or newer."
        )
    return tuple(dict.fromkeys(label for _, _, label in ordered))


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
