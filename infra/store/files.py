"""Bytes on any fsspec file system: whole files or none, and one conditional create."""

import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from infra.store import layout
from infra.store.hashing import HashingFile, sha256_of
from infra.store.write_errors import as_store_errors
from mgrpo_core.errors import AlreadyCommittedError, StoreError, StoreNotWritableError, TableIntegrityError

_CHUNK = 1 << 20
_TEMPORARY = ".tmp-"  # readers skip such names, and no glob for *.parquet or *.json finds them
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_CONFLICT_ATTEMPTS = 5
_IDENTITY = ("size", "ino", "mtime", "ETag", "LastModified")  # what file systems know of a file's content


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file of the store as it was written: path from the store's root, content hash, size, rows of a table."""

    path: str
    sha256: str
    bytes: int
    rows: int | None = None


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
        self._written: dict[str, tuple[object, ...]] = {}

    def full(self, path: str) -> str:
        """The file system's own name of `path`."""
        return f"{self.root}/{path}" if path else self.root

    def uri(self, path: str) -> str:
        """For people and manifests: the store's URL and the path."""
        return f"{self.url.rstrip('/')}/{path}"

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder. A store that cannot be asked raises: no answer is not "no"."""
        self.fs.invalidate_cache()
        try:
            self.fs.info(self.full(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; [] if there is none."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.full(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}
        return sorted(name for name in names if name and not name.startswith(_TEMPORARY))

    def files_below(self, folder: str) -> list[str]:
        """Paths of all files below a folder, sorted."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.full(folder))
        prefix = self.full("") + "/"
        paths = (str(path).removeprefix(prefix) for path in found)
        return sorted(path for path in paths if f"/{_TEMPORARY}" not in path)

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

        Raises:
            StoreNotWritableError: no space or no permission.
            AlreadyCommittedError: the file is of an iteration that has been committed; its files are never replaced.
        """
        with as_store_errors(self.uri(path)), self._temporary(path) as temporary:
            with temporary.open("wb", buffering=_CHUNK) as raw:
                file = HashingFile(raw)
                yield file
                raw.flush()
                if self.is_local:
                    os.fsync(raw.fileno())
            self._refuse_if_committed(path)
            if self.is_local:
                temporary.replace(self.full(path))
                _sync_folder(temporary.parent)
            else:
                self.fs.put_file(str(temporary), self.full(path))
            self._written[path] = self._identity(path)

    def _refuse_if_committed(self, path: str) -> None:
        manifest = layout.manifest_beside(path)
        if manifest is not None and self.exists(manifest):
            raise AlreadyCommittedError(
                f"{self.uri(path)}: its iteration is committed already, by another process or an earlier attempt. "
                "Its files stand; start again to continue after it."
            )

    @contextmanager
    def _temporary(self, path: str) -> Iterator[Path]:
        """An empty file of a name of its own: beside its place on a local disk, in the spool folder elsewhere."""
        folder = Path(self.full(path)).parent if self.is_local else Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        # Not mkstemp: its files are for their owner alone, and a store is read by other accounts as the umask allows.
        temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def create(self, path: str, data: bytes) -> FileRef:
        """Write a file that must not exist: of several writers exactly one succeeds, and its content is complete.

        Raises: FileExistsError for all others.
        """
        with as_store_errors(self.uri(path)):
            if self.is_local:
                self._link(path, data)
            else:
                self._put_if_absent(path, data)
        return FileRef(path, hashlib.sha256(data).hexdigest(), len(data))

    def _link(self, path: str, data: bytes) -> None:
        place = Path(self.full(path))
        with self._temporary(path) as temporary:
            with temporary.open("wb") as raw:
                raw.write(data)
                raw.flush()
                os.fsync(raw.fileno())
            try:
                # A link, not a rename: it refuses to replace, and the name appears with its whole content.
                os.link(temporary, place)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StoreNotWritableError(
                        f"{self.uri(path)}: its file system has no hard links ({error.strerror}), so that two writers "
                        "could both commit. Give a --store on another disk, or an object store."
                    ) from error
                raise
            _sync_folder(place.parent)

    def _put_if_absent(self, path: str, data: bytes) -> None:
        for attempt in range(_CONFLICT_ATTEMPTS):
            try:
                self.fs.pipe_file(self.full(path), data, mode="create")
                return
            except OSError as error:
                # Servers differ in how they say 412 Precondition Failed: FileExistsError, or EINVAL. EINVAL also means
                # a bad request, hence the look.
                if isinstance(error, FileExistsError) or (error.errno == errno.EINVAL and self.exists(path)):
                    raise FileExistsError(errno.EEXIST, "somebody else wrote it first", path) from error
                # 409: another conditional write of this name is under way, and may yet fail.
                if "ConditionalRequestConflict" not in str(error) or attempt + 1 == _CONFLICT_ATTEMPTS:
                    raise

    def upload(self, local: Path, path: str) -> FileRef:
        """Copy a local file into the store."""
        if not self.is_local:  # no second copy on this machine's disk
            with as_store_errors(self.uri(path)):
                self.fs.put_file(str(local), self.full(path))
            return FileRef(path, sha256_of(local), local.stat().st_size)
        with local.open("rb") as source, self.writing(path) as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
        return FileRef(path, file.sha256, file.bytes)

    def download(self, path: str, local: Path) -> str:
        """Copy a file of the store to this machine; return the sha256 of what came.

        Raises: TableIntegrityError if there is no such file.
        """
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.fs.get_file(self.full(path), str(local))
        except FileNotFoundError as error:
            raise TableIntegrityError(f"{self.uri(path)}: missing. Restore it from backup.") from error
        return sha256_of(local)

    def changed_since_written(self, ref: FileRef) -> str | None:
        """How a file differs from what was written, without reading it; None if it does not.

        Its size always; where this process wrote it also what the file system knows of it (time, inode, ETag).
        """
        try:
            now = self._identity(ref.path)
        except FileNotFoundError:
            return "it is missing"
        if now[0] != ref.bytes:
            return f"it has {now[0]} bytes, {ref.bytes} were written"
        return "another process wrote it since" if self._written.get(ref.path, now) != now else None

    def forget(self, folder: str) -> None:
        """Remember no longer what was written below a folder: it is committed, or gone."""
        for path in [path for path in self._written if path.startswith(f"{folder}/")]:
            del self._written[path]

    def _identity(self, path: str) -> tuple[object, ...]:
        self.fs.invalidate_cache()
        info = self.fs.info(self.full(path))
        return tuple(info.get(name) for name in _IDENTITY)

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
        while self.exists(target := f"{aside}/{number:04d}-{path.replace('/', '_')}"):
            number += 1
        if self.is_local:
            Path(self.full(aside)).mkdir(parents=True, exist_ok=True)
            Path(self.full(path)).replace(self.full(target))
        else:
            # File by file: what a recursive `mv` makes of the folder's own name differs between file systems.
            for one in self.files_below(path) or [path]:
                self.fs.mv(self.full(one), self.full(target + one.removeprefix(path)))
            self.remove_folder(path)  # empty now, and in the way where folders are more than prefixes
        self.forget(path)
        return target

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.fs.rm_file(self.full(path))
        self.fs.invalidate_cache()
        self._written.pop(path, None)

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all below it; nothing happens if there is none."""
        if self.exists(path):
            self.fs.rm(self.full(path), recursive=True)
            self.fs.invalidate_cache()
        self.forget(path)

    def local(self, path: str) -> Path | None:
        """The file or folder itself on a local store; None elsewhere."""
        return Path(self.full(path)) if self.is_local else None

    def probe(self, folder: str) -> None:
        """Create a small file, once, and remove it: what every commit relies on.

        Raises:
            StoreNotWritableError: the store cannot be written.
            StoreError: a second creation succeeded, so that two writers could both commit an iteration.
        """
        path = f"{folder}/{_TEMPORARY}probe-{secrets.token_hex(8)}"
        try:
            self.create(path, b"mgrpo")
            try:
                self.create(path, b"again")
            except FileExistsError:
                return
            finally:
                self.fs.rm_file(self.full(path))
        except StoreError:
            raise
        except Exception as error:  # object stores have errors of their own: no credentials, no bucket, no route
            raise StoreNotWritableError(
                f"{self.uri(folder)}: cannot be written ({type(error).__name__}: {error}). Check the address and the "
                "credentials, or give another --store."
            ) from error
        raise StoreError(
            f"{self.url}: this server ignores conditional writes (If-None-Match), so that two writers could both "
            "commit an iteration. Use one that honours them (AWS S3, MinIO, SeaweedFS), or a local folder."
        )


def _sync_folder(folder: Path) -> None:
    """Make a new name durable: without it a power cut may keep the content and lose the name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
