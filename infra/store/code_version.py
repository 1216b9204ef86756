"""Which code computed an iteration: the release, and a hash of the algorithm's sources."""

import hashlib
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import mgrpo_core


@lru_cache(maxsize=1)
def code_version() -> str:
    """`<version>+<12 hex digits>` over every source file of mgrpo_core: a replay by other code is told apart."""
    root = Path(mgrpo_core.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{metadata.version('mgrpo')}+{digest.hexdigest()[:12]}"
