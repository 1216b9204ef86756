"""Is an answer right? Rules by name, or a user's own function by import path."""

import importlib
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from typing import cast

from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import Component, component_of, failed, scored
from mgrpo_core.trajectories import Query

Verifier = Callable[[str, Query], object]
"""(answer, query) -> bool or number; None where there is nothing to grade. Called once for each answered rollout."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Only what SQuAD strips, ASCII punctuation, is stripped: "C++" and "C#" are known to meet there.
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"([-+]?)\s*(?:[$€£¥]\s*)?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:[eE]([-+]?\d{1,3}))?\s*(%?)")
_CHOICE = re.compile(r"[\s(\[]*([A-Za-z])[\s)\].:]*")
_SCALES = {"thousand": 1e3, "k": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra white space: SQuAD's normalisation, after Unicode NFKC."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, query: Query) -> bool:
    """True if the answer equals a reference after normalisation.

    Two texts that normalise to nothing ("the", "a") say nothing about each other: they match only as they stand.
    """
    normal = normalize_answer(answer)
    if not normal:
        return any(answer.strip() == reference.strip() for reference in query.answers)
    return any(normal == normalize_answer(reference) for reference in query.answers)


def numeric(answer: str, query: Query, *, relative_tolerance: float = 1e-6) -> bool:
    """True if the answer is a number within `relative_tolerance` of a reference, |a - r| <= tolerance * max(1, |r|).

    Read are a sign, thousands separators, a currency sign, an exponent, a per cent sign (12% is 0.12), "thousand" to
    "trillion", and one trailing unit, which must then be the reference's where that has one.
    """
    found = _quantity(answer)
    if found is None:
        return False
    value, unit = found
    for reference in query.answers:
        wanted = _quantity(reference)
        if wanted is None:
            continue
        same_unit = not unit or not wanted[1] or unit == wanted[1]
        if same_unit and abs(value - wanted[0]) <= relative_tolerance * max(1.0, abs(wanted[0])):
            return True
    return False


def choice(answer: str, query: Query) -> bool:
    """True if the answer names the letter of a reference: "B", "(b)", "B." or "B: Lima" for the reference "B".

    A letter followed by more text counts only with a mark after it: "A cat" is no choice of A.
    """
    letter = _letter(answer)
    return letter is not None and any(letter == _letter(reference) for reference in query.answers)


VERIFIERS: Mapping[str, Verifier] = {"exact_match": exact_match, "numeric": numeric, "choice": choice}
"""Verifiers by the name that a config gives them."""


def verifier_of(name: str) -> Verifier:
    """The verifier called `name`: one of `VERIFIERS`, or `package.module:function`.

    Raises: ConfigError if there is none, saying whether the module, or the function in it, is missing.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if ":" not in name:
        raise ConfigError(
            f"verifier {name!r}: unknown. Use one of {', '.join(VERIFIERS)}, or the import path of your own function "
            "(answer, query) -> number or bool, as package.module:function."
        )
    return cast("Verifier", imported(name, what="verifier"))


def imported(path: str, *, what: str) -> Callable[..., object]:
    """The callable at `package.module:name`.

    Raises: ConfigError naming the path and what is wrong with it.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{what} {path!r}: the module {module_name!r} cannot be imported: {error}. "
            "Install it where mgrpo runs, or put its folder on PYTHONPATH."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{what} {path!r}: no module is named before the colon. Use package.module:name.") from error
    found: object = getattr(module, name, None)
    if not callable(found):
        public = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        raise ConfigError(f"{what} {path!r}: {module_name} has no callable {name!r}. It has: {public or 'none'}.")
    return found


def correctness(verifier: Verifier, answer: str | None, query: Query, *, name: str = "verifier") -> Component:
    """The correctness of a main trajectory's answer.

    No answer is a wrong one: 0, the policy's fault. A verifier that raises has failed: no number.

    Raises: ConfigError if the verifier returns what is no score (see `component_of`).
    """
    if answer is None:
        return scored(0.0)
    try:
        returned = verifier(answer, query)
    except Exception as error:  # a user's function, or a service behind it
        return failed(f"{name}: {error!r}")
    return component_of(returned, name)


def _quantity(text: str) -> tuple[float, str] | None:
    """Value and unit of a text that is one number, perhaps with a unit."""
    text = unicodedata.normalize("NFKC", text).strip().rstrip(".").replace("\u2212", "-")
    match = _NUMBER.match(text)
    if match is None or (match[2] is None and match[3] is None):
        return None
    sign, whole, fraction, exponent, per_cent = match.groups()
    value = float(f"{sign}{(whole or '0').replace(',', '')}{fraction or ''}e{exponent or 0}")
    words = text[match.end() :].lower().split()
    if words and words[0] in _SCALES:
        value *= _SCALES[words.pop(0)]
    if len(words) > 1 or any(char.isdigit() for word in words for char in word):
        return None
    return value / 100 if per_cent else value, words[0] if words else ""


def _letter(text: str) -> str | None:
    text = text.strip()
    match = _CHOICE.match(text)
    if match is None:
        return None
    marked = match.end() == len(text) or any(mark in match[0] for mark in ")].:")
    return match[1].upper() if marked else None
