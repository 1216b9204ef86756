"""Credentials in a config: it is stored, shown and exported, so none may be in it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

_URL_USER = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@]*:[^\s@]*@", re.IGNORECASE)
_URL_PARAMETER = re.compile(
    r"[?&](?:api[_-]?key|access[_-]?token|auth|password|secret|sig|signature|token|x-amz-[a-z-]+)=[^\s&]", re.IGNORECASE
)
_ASSIGNED = re.compile(
    r"\b(?:api[_-]?key|access[_-]?key|secret[_-]?key|secret|password|passwd|auth[_-]?token|access[_-]?token)"
    r"\s*[=:]\s*[\"']?(?=[^\s\"']*\d)[A-Za-z0-9+/_.-]{8,}",
    re.IGNORECASE,
)
# As their issuers make them: no word of a prompt looks like one.
_TOKEN = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:ghp|gho|ghs|ghu|github_pat)_[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\bAIza[A-Za-z0-9_-]{35}"
    r"|\bBearer\s+[A-Za-z0-9._~+/-]{16,}"
)
_KINDS = (
    (_URL_USER, "a URL with a password"),
    (_URL_PARAMETER, "a URL with a key among its parameters"),
    (_TOKEN, "a key or token"),
    (_ASSIGNED, "a key or password"),
)


def credentials_in(raw: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Where a credential seems to be, and what kind; never the value, for messages are logged."""
    if isinstance(raw, str):
        kind = next((kind for pattern, kind in _KINDS if pattern.search(raw)), None)
        if kind is not None:
            yield place, kind
    elif isinstance(raw, Mapping):
        for key, value in cast("Mapping[object, object]", raw).items():
            yield from credentials_in(value, f"{place}.{key}" if place else str(key))
    elif isinstance(raw, Sequence):
        for index, value in enumerate(cast("Sequence[object]", raw)):
            yield from credentials_in(value, f"{place}[{index}]")
