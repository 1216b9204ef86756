"""A config as flat parameters, each value spelt in one way only."""

import hashlib
import json
from collections.abc import Mapping, Sequence

# MLflow cuts a value at 6,000 characters without a word; ours say that they are cut, and differ where the value does.
LONGEST_VALUE = 500


def flat_parameters(config: Mapping[str, object]) -> dict[str, str]:
    """`{"loss": {"clip_low": 0.2}}` -> `{"loss.clip_low": "0.2"}`, keys sorted; an empty section is a value `{}`."""
    flat: dict[str, str] = {}
    _flatten(config, "", flat)
    return dict(sorted(flat.items()))


def canonical_text(value: object) -> str:
    """One text for equal values (1e-06 and 0.000001, (1, 2) and [1, 2], 1 and 1.0), at most `LONGEST_VALUE` long."""
    text = value if isinstance(value, str) else json.dumps(_canonical(value), sort_keys=True, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: LONGEST_VALUE - 80]}… sha256:{digest}"


def canonical_json(config: Mapping[str, object]) -> str:
    """The whole config as JSON for people, in which equal configs are equal texts."""
    return json.dumps(_canonical(config), sort_keys=True, ensure_ascii=False, indent=1)


def _flatten(value: object, key: str, flat: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            # A dot in a name of the config would make two keys one.
            part = str(name).replace("\\", "\\\\").replace(".", "\\.")
            _flatten(inner, f"{key}.{part}" if key else part, flat)
    else:
        flat[key] = canonical_text(value)


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _canonical(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_canonical(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
