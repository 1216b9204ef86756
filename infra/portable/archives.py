"""Archives of an export: plain tar, or tar in zstandard; the record first, then every file.

Both are read and written as streams. An archive comes from elsewhere: whatever it says of itself is checked against
its record before a byte of it is written.
"""

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa

from infra.portable.checked_copy import CheckedReader
from infra.store.export_record import MOST_RECORD_BYTES, ExportRecord, parse_record
from infra.store.files import FileRef, StoreFiles
from mgrpo_core.errors import MGRPOError, TableIntegrityError

SUFFIXES = (".tar", ".tar.zst")
_BLOCK = 512
_BROKEN = (tarfile.TarError, EOFError, OSError, pa.ArrowException, ValueError)
_MOST_EXPANDED, _EXPANDED_FROM = 500, 1 << 30
"""Tables hold zstandard pages already and JSON shrinks to a tenth: nothing real expands more than this."""


def is_archive(address: str) -> bool:
    """By its name."""
    return address.endswith(SUFFIXES)


def write_archive(file: Any, address: str, record: ExportRecord, source: StoreFiles) -> None:
    """Write an export into an open file; the same export gives the same bytes.

    Raises: TableIntegrityError where a file is not what the record says.
    """
    data = record.to_bytes()
    with (
        _compressed(file, address) as out,
        tarfile.open(fileobj=cast("Any", out), mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        tar.addfile(_member(f"{record.run}/export.json", len(data)), io.BytesIO(data))
        for ref in record.copying_order():
            with source.open(ref.path) as opened:
                reader = CheckedReader(opened, ref, source.uri(ref.path))
                tar.addfile(_member(ref.path, ref.bytes), cast("Any", reader))
                reader.check()


@contextmanager
def open_archive(file: BinaryIO, address: str, packed_bytes: int) -> Iterator[tuple[ExportRecord, bytes, "Members"]]:
    """An archive's record, and its members as they come.

    Raises: TableIntegrityError: it is no archive of an export, is cut off, or is not what its record says.
    """
    try:
        with _expanded(file, address) as plain:
            bounded = _Bounded(plain, MOST_RECORD_BYTES)
            with tarfile.open(fileobj=cast("Any", bounded), mode="r|") as tar:
                first = tar.next()
                if first is None or not first.name.endswith("/export.json") or not _is_plain(first):
                    raise TableIntegrityError(f"{address}: does not begin with the record of an export.")
                data = cast("BinaryIO", tar.extractfile(first)).read()
                record = parse_record(data, f"{address}:{first.name}")
                _refuse_bomb(record, packed_bytes, address)
                # Each member: its header, perhaps one more for a long name, and padding.
                bounded.limit += record.total_bytes + 8 * _BLOCK * (len(record.files) + 64)
                yield record, data, Members(tar, record, address)
    except _BROKEN as error:
        if isinstance(error, MGRPOError):  # ours, or of whoever reads the members
            raise
        raise TableIntegrityError(f"{address}: cannot be read to its end ({error}). Copy or export it again.") from None


class Members:
    """The files of an archive, each met once."""

    def __init__(self, tar: tarfile.TarFile, record: ExportRecord, address: str) -> None:
        self._tar = tar
        self._record = record
        self._address = address

    def __iter__(self) -> Iterator[tuple[FileRef, BinaryIO]]:
        """Raises: TableIntegrityError for a link, a device, a name or size that the record has not, a missing file."""
        left = dict(self._record.files)
        while (member := self._tar.next()) is not None:
            cast("Any", self._tar).members = []  # it would keep them all
            ref = left.pop(member.name.removeprefix(f"{self._record.run}/"), None)
            if ref is None or member.name != ref.path:
                raise TableIntegrityError(
                    f"{self._address}: holds {member.name!r}, which its record does not name, or has named before. "
                    "Nothing was imported."
                )
            if not _is_plain(member) or member.size != ref.bytes:
                raise TableIntegrityError(
                    f"{self._address}: {member.name} is a file of {member.size} bytes or none at all, the record says "
                    f"a file of {ref.bytes}. Nothing was imported."
                )
            yield ref, cast("BinaryIO", self._tar.extractfile(member))
        if left:
            raise TableIntegrityError(
                f"{self._address}: ends without {len(left)} files, the first {min(left)}. Copy or export it again."
            )


class _Bounded:
    """What comes out of an archive, up to what it may be: a header too can claim to be endless."""

    def __init__(self, file: Any, limit: int) -> None:
        self._file = file
        self.limit = limit
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        if self._read > self.limit:
            raise TableIntegrityError("the archive holds more bytes than its record says. Nothing was imported.")
        return data


def _refuse_bomb(record: ExportRecord, packed_bytes: int, address: str) -> None:
    if record.total_bytes > max(_EXPANDED_FROM, _MOST_EXPANDED * packed_bytes):
        raise TableIntegrityError(
            f"{address}: {packed_bytes} bytes that say they become {record.total_bytes}. No export "
            "does that; nothing was imported."
        )


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() and not member.issparse()


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o644, 0
    return member


@contextmanager
def _compressed(file: Any, address: str) -> Iterator[Any]:
    if not address.endswith(".zst"):
        yield file
        return
    with pa.CompressedOutputStream(pa.PythonFile(file, mode="w"), "zstd") as out:
        yield out


@contextmanager
def _expanded(file: BinaryIO, address: str) -> Iterator[Any]:
    if not address.endswith(".zst"):
        yield file
        return
    with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as plain:
        yield plain
