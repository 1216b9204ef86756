"""Bytes that pass from one place to another, and must be those that a record names."""

import hashlib
from typing import BinaryIO

from infra.store.files import FileRef
from mgrpo_core.errors import TableIntegrityError

CHUNK = 4 << 20


class CheckedReader:
    """A stream of a file that raises at its end unless size and hash are those of its record.

    It never gives more bytes than were declared.
    """

    def __init__(self, source: BinaryIO, ref: FileRef, where: str) -> None:
        self._source = source
        self._ref = ref
        self._where = where
        self._sha256 = hashlib.sha256()
        self._left = ref.bytes

    def read(self, size: int = -1) -> bytes:
        """The next bytes; raises TableIntegrityError where they are too few, too many or others."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.read(wanted) if wanted else b""
        self._sha256.update(data)
        self._left -= len(data)
        if wanted and not data:
            self._raise(f"ends {self._left} bytes too early")
        return data

    def check(self) -> None:
        """Once all was read. Raises: TableIntegrityError."""
        if self._left:
            self._raise(f"ends {self._left} bytes too early")
        found = self._sha256.hexdigest()
        if found != self._ref.sha256:
            self._raise(f"sha256 {found[:12]}, its record says {self._ref.sha256[:12]}")

    def _raise(self, what: str) -> None:
        raise TableIntegrityError(f"{self._where}: {what}. The file changed after it was written; nothing was copied.")


def copy_checked(source: BinaryIO, ref: FileRef, where: str, target: object) -> None:
    """Copy a file of a record into an open one.

    Raises: TableIntegrityError, at the latest at the end: whoever writes the target then leaves nothing behind.
    """
    reader = CheckedReader(source, ref, where)
    while data := reader.read(CHUNK):
        target.write(data)  # type: ignore[attr-defined]
    reader.check()
    if source.read(1):
        raise TableIntegrityError(f"{where}: is longer than its record says, {ref.bytes} bytes. Nothing was copied.")
