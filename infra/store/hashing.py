"""Content hashes: of what is written as it passes, and of files of this machine."""

import hashlib
from pathlib import Path
from typing import BinaryIO


class HashingFile:
    """A binary file that knows the sha256 of what went through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        self._sha256.update(data)
        self._file.write(data)
        self.bytes += size
        return size

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The owner closes the file below."""

    @property
    def closed(self) -> bool:
        return False

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


def sha256_of(local: Path) -> str:
    """Hash of a file of this machine."""
    return sha256_and_size(local)[0]


def sha256_and_size(local: Path) -> tuple[str, int]:
    """Hash of a file of this machine, and how many bytes were hashed. Other threads run meanwhile."""
    with local.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
