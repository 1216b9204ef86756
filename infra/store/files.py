"""Bytes on any fsspec file system: whole files or none, and one conditional create."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mgrpo_core.errors import StoreError, StoreNotWritableError, TableIntegrityError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file of the store as it was written: path from the store's root, content hash, size, rows of a table."""

    path: str
    sha256: str
    bytes: int
    rows: int | None = None


class HashingFile:
    """A binary file that knows the sha256 of what went through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.bytes += len(memoryview(data).cast("B"))
        self._file.write(data)
        return len(data)

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


class StoreFiles:
    """A store's root on an fsspec file system. All paths are relative to it (see `layout`).

    A file appears whole or not at all: on a local disk it is written beside its place, flushed to the disk and renamed;
    elsewhere it is spooled and uploaded in one piece, which object stores make visible only when complete. No listing
    cache is trusted.
    """

    def __init__(self, url: str) -> None:
        """Raises: StoreError if no file system answers to the URL."""
        try:
            # Never a cached instance: its listing cache would hide what other processes write.
            fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except (ValueError, ImportError, TypeError) as error:
            raise StoreError(
                f"store {url!r}: no file system for it ({error}). Give a folder or an fsspec URL."
            ) from error
        self.url = url
        self.fs: Any = fs
        self.root = str(root).rstrip("/")
        self.is_local = isinstance(fs, LocalFileSystem)

    def full(self, path: str) -> str:
        """The file system's own name of `path`."""
        return f"{self.root}/{path}" if path else self.root

    def uri(self, path: str) -> str:
        """For people and manifests: the store's URL and the path."""
        return f"{self.url.rstrip('/')}/{path}"

    def exists(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.full(path)))

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; [] if there is none."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.full(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}
        return sorted(name for name in names if name and not name.startswith(".tmp-"))

    def files_below(self, folder: str) -> list[str]:
        """Paths of all files below a folder, sorted."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.full(folder))
        prefix = self.full("") + "/"
        paths = (str(path).removeprefix(prefix) for path in found)
        return sorted(path for path in paths if "/.tmp-" not in path)

    def read(self, path: str) -> bytes:
        """Raises: TableIntegrityError if there is no such file."""
        try:
            return cast("bytes", self.fs.cat_file(self.full(path)))
        except FileNotFoundError as error:
            raise TableIntegrityError(
                f"{self.uri(path)}: missing. Restore it from backup, or go back to an earlier iteration."
            ) from error

    def write(self, path: str, data: bytes) -> FileRef:
        """Write a whole file, replacing what was there."""
        with self.writing(path) as file:
            file.write(data)
        return FileRef(path, file.sha256, file.bytes)

    @contextmanager
    def writing(self, path: str) -> Iterator[HashingFile]:
        """A file that takes its place when the block ends well, and leaves nothing behind when it does not.

        Raises: StoreNotWritableError for no space or no permission.
        """
        with self._as_store_errors(path):
            if self.is_local:
                place = Path(self.full(path))
                place.parent.mkdir(parents=True, exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=place.parent)
            else:
                descriptor, temporary = tempfile.mkstemp(prefix="mgrpo-")
            try:
                with os.fdopen(descriptor, "wb", buffering=_CHUNK) as raw:
                    file = HashingFile(raw)
                    yield file
                    raw.flush()
                    if self.is_local:
                        os.fsync(raw.fileno())
                if self.is_local:
                    Path(temporary).chmod(0o666 & ~_umask())
                    Path(temporary).replace(self.full(path))
                else:
                    self.fs.put_file(temporary, self.full(path))
            finally:
                Path(temporary).unlink(missing_ok=True)

    def create(self, path: str, data: bytes) -> FileRef:
        """Write a file that must not exist: of several writers exactly one succeeds, and its content is complete.

        Raises: FileExistsError for all others.
        """
        with self._as_store_errors(path):
            if self.is_local:
                self._link(path, data)
            else:
                try:
                    self.fs.pipe_file(self.full(path), data, mode="create")
                except OSError as error:
                    # Servers differ in how they say 412 Precondition Failed: FileExistsError, or EINVAL.
                    if isinstance(error, FileExistsError) or error.errno == errno.EINVAL:
                        raise FileExistsError(errno.EEXIST, "somebody else wrote it first", path) from error
                    raise
        return FileRef(path, hashlib.sha256(data).hexdigest(), len(data))

    def _link(self, path: str, data: bytes) -> None:
        place = Path(self.full(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=place.parent)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                raw.write(data)
                raw.flush()
                os.fsync(raw.fileno())
            Path(temporary).chmod(0o666 & ~_umask())
            os.link(temporary, place)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def upload(self, local: Path, path: str) -> FileRef:
        """Copy a local file into the store."""
        with local.open("rb") as source, self.writing(path) as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
        return FileRef(path, file.sha256, file.bytes)

    def sha256(self, path: str) -> tuple[str, int]:
        """Hash and size of a file, read as a stream.

        Raises: TableIntegrityError if there is no such file.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with self.fs.open(self.full(path), "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
        except FileNotFoundError as error:
            raise TableIntegrityError(f"{self.uri(path)}: missing. Restore it from backup.") from error
        return digest.hexdigest(), size

    def move_aside(self, path: str, aside: str) -> str:
        """Move a file or folder below `aside`, under a name that is free; return where it went."""
        number = len(self.names(aside))
        target = f"{aside}/{number:04d}-{path.replace('/', '_')}"
        if self.is_local:
            Path(self.full(aside)).mkdir(parents=True, exist_ok=True)
            Path(self.full(path)).replace(self.full(target))
        else:
            self.fs.mv(self.full(path), self.full(target), recursive=True)
            self.fs.invalidate_cache()
        return target

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all below it; nothing happens if there is none."""
        if self.exists(path):
            self.fs.rm(self.full(path), recursive=True)
            self.fs.invalidate_cache()

    def local(self, path: str) -> Path | None:
        """The file or folder itself on a local store; None elsewhere."""
        return Path(self.full(path)) if self.is_local else None

    def probe_writable(self, folder: str) -> None:
        """Write and remove a small file.

        Raises: StoreNotWritableError.
        """
        path = f"{folder}/.probe-{os.getpid()}"
        self.write(path, b"mgrpo")
        self.fs.rm_file(self.full(path))

    @contextmanager
    def _as_store_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "No space left. Nothing of this file was kept; free some and start again: it resumes."
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
                advice = "It cannot be written. Give another --store, or the right to write there."
            else:
                raise
            raise StoreNotWritableError(f"{self.uri(path)}: {error.strerror or error}. {advice}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
