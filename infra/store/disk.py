"""What a local disk needs for a file to be there whole or not at all, and to stay."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""How names of unfinished files begin: readers skip them, and no glob for *.parquet or *.json finds them."""


@contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """An empty file of a name of its own, gone when the block ends unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not mkstemp: its files are for their owner alone, and a store is read by other accounts as the umask allows.
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def create_file(place: Path, data: bytes) -> None:
    """Write a file that must not exist: complete when its name appears, and on the disk when this returns.

    Raises:
        FileExistsError: it exists.
        OSError: no hard links on this file system, among others.
    """
    with temporary_file(place.parent) as temporary:
        with temporary.open("wb") as raw:
            raw.write(data)
            raw.flush()
            os.fsync(raw.fileno())
        # A link, not a rename: it refuses to replace, and the name appears with its whole content.
        os.link(temporary, place)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make a new name durable: without it a power cut may keep the content and lose the name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
