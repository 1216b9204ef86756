"""Names that MLflow accepts, one for each name of ours and no two for the same."""

import hashlib
import re

_PLAIN = re.compile(r"[A-Za-z0-9_\-. ]")
_LONGEST = 250
_HASH = 32


def legal_name(name: str) -> str:
    """Map a metric or parameter name to a legal one, injectively; most names stay as they are.

    MLflow 3 allows word characters, `-`, `.`, space, `:` and `/`, at most 250 characters, and nothing that reads as an
    odd path (`a//b`, `../x`, a leading `/`). Any other character, and the colon, becomes its code point between colons
    (`@` -> `:40:`), so that `a@b` and `a_b` stay two names; an empty path segment becomes `::`; a segment's first dot
    is escaped. A name that is then too long keeps its beginning and ends in `::` and 32 digits of its sha256.
    """
    legal = "/".join(_segment(part) for part in name.split("/"))
    if len(legal) <= _LONGEST:
        return legal
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH]
    return f"{legal[: _LONGEST - _HASH - 2].rstrip('/')}::{digest}"


def _segment(part: str) -> str:
    if not part:
        return "::"
    escaped = "".join(c if _PLAIN.match(c) else f":{ord(c):x}:" for c in part)
    return f":2e:{escaped[1:]}" if escaped[0] == "." else escaped
