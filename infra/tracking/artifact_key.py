"""Keys that Prefect accepts for artifacts, one for each name of ours."""

import hashlib
import re

_OTHER = re.compile(r"[^a-z0-9]+")
_HASH = 8


def artifact_key(*parts: str) -> str:
    """Join the parts with dashes into lowercase letters, digits and dashes: ("mgrpo", "summary") -> "mgrpo-summary".

    A part with any other character, or with dashes that could be taken for the join, ends in 8 digits of its sha256:
    "run_1" and "run-1" keep two artifacts.
    """
    return "-".join(_legal(part) for part in parts)


def _legal(part: str) -> str:
    plain = _OTHER.sub("-", part.lower()).strip("-")
    if plain == part:
        return part
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH]
    return f"{plain}-{digest}" if plain else digest
