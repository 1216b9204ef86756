"""Bytes on any fsspec file system: whole files or none, and one conditional create."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.implementations.local import LocalFileSystem

from infra.store import layout
from infra.store.address import file_system, is_s3
from infra.store.disk import TEMPORARY, create_file, sync_folder, temporary_file
from infra.store.hashing import HashingFile, sha256_and_size, sha256_of
from infra.store.write_errors import as_store_errors
from mgrpo_core.errors import AlreadyCommittedError, StoreNotWritableError, TableIntegrityError

PATIENCE_S = 180.0
"""How long an S3 server that gives no answer is asked again: a restart takes seconds, a failover a minute or two."""

_CHUNK = 1 << 20
_SMALL_BYTES = 4 << 20
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_CONTENT = ("size", "ino", "mtime", "ETag")  # what file systems know of a file's content


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
    elsewhere it is spooled and uploaded, and object stores show an upload only when it is complete. No listing cache is
    trusted.
    """

    def __init__(self, url: str, *, single_writer: bool = False, patience_s: float = PATIENCE_S) -> None:
        """A store at a folder or fsspec URL.

        Args:
            url: without credentials.
            single_writer: a promise that nobody else writes this store meanwhile. Then a server without conditional
                writes will do: `create` looks first.
            patience_s: how long an S3 server that gives no answer is asked again, before a StoreError says so.

        Raises: StoreError if no file system answers to the URL, or if it holds credentials.
        """
        fs, root = file_system(url, patience_s)
        self.url = url
        self.fs: Any = fs
        self.root = root.rstrip("/")
        self.single_writer = single_writer
        self.is_local = isinstance(fs, LocalFileSystem)
        self._is_s3 = is_s3(url)
        self._written: dict[str, tuple[object, ...]] = {}

    def full(self, path: str) -> str:
        """The file system's own name of `path`."""
        return f"{self.root}/{path}" if path else self.root

    def uri(self, path: str) -> str:
        """For people and manifests: the store's URL and the path."""
        return f"{self.url.rstrip('/')}/{path}"

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder. A store that cannot be asked raises: no answer is not "no"."""
        if self._is_s3:
            return self.holds(path) or bool(self.fs.first_below(self.full(path)))
        self.fs.invalidate_cache()
        try:
            self.fs.info(self.full(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def holds(self, path: str) -> bool:
        """Whether there is this file. On S3 one request; `exists` takes a second one to deny that it is a folder."""
        return self.fs.look(self.full(path)) is not None if self._is_s3 else self.exists(path)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; [] if there is none."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.full(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}
        return sorted(name for name in names if name and not name.startswith(TEMPORARY))

    def files_below(self, folder: str) -> list[str]:
        """Paths of all files below a folder, sorted."""
        return sorted(path for path in self._infos_below(folder) if f"/{TEMPORARY}" not in path)

    def _infos_below(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """What the file system knows of each file below a folder. On S3 one request for a thousand files."""
        self.fs.invalidate_cache()
        prefix = self.full("") + "/"
        found = self.fs.find(self.full(folder), detail=True)
        # SeaweedFS keeps the folders of files that are gone; s3fs reports one that was asked for.
        return {str(path).removeprefix(prefix): info for path, info in found.items() if info["type"] == "file"}

    def read(self, path: str) -> bytes:
        """Raises: TableIntegrityError if there is no such file."""
        try:
            return cast("bytes", self.fs.cat_file(self.full(path)))
        except FileNotFoundError as error:
            raise TableIntegrityError(
                f"{self.uri(path)}: missing. Restore it from backup, or go back to an earlier iteration."
            ) from error

    def open(self, path: str) -> BinaryIO:
        """A file for reading here and there; on S3 a small one comes whole, in one request.

        Raises: FileNotFoundError.
        """
        if self._is_s3 and (data := self.fs.read_small(self.full(path), _SMALL_BYTES)) is not None:
            return BytesIO(data)
        return cast("BinaryIO", self.fs.open(self.full(path), "rb"))

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
        folder = Path(self.full(path)).parent if self.is_local else Path(tempfile.gettempdir())
        with as_store_errors(self.uri(path)), temporary_file(folder) as temporary:
            with temporary.open("wb", buffering=_CHUNK) as raw:
                file = HashingFile(raw)
                yield file
                raw.flush()
                if self.is_local:
                    os.fsync(raw.fileno())
            self._refuse_if_committed(path)
            if self.is_local:
                temporary.replace(self.full(path))
                sync_folder(temporary.parent)
            self._written[path] = self._stat(path) if self.is_local else self._send(temporary, path)

    def _send(self, local: Path, path: str) -> tuple[object, ...]:
        """Upload a file; return what the file system knows of its content."""
        if self._is_s3:
            return _content({"size": local.stat().st_size, "ETag": self.fs.send(local, self.full(path))})
        self.fs.put_file(str(local), self.full(path))
        return self._stat(path)

    def _refuse_if_committed(self, path: str) -> None:
        manifest = layout.manifest_beside(path)
        if manifest is not None and self.holds(manifest):
            raise AlreadyCommittedError(
                f"{self.uri(path)}: its iteration is committed already, by another process or an earlier attempt. "
                "Its files stand; start again to continue after it."
            )

    def create(self, path: str, data: bytes) -> FileRef:
        """Write a file that must not exist: of several writers exactly one succeeds, and its content is complete.

        Raises: FileExistsError for all others.
        """
        with as_store_errors(self.uri(path)):
            if self.is_local:
                self._create_on_disk(path, data)
            elif self._is_s3:
                self.fs.create_object(self.full(path), data, look_first=self.single_writer)
            elif self.single_writer and self.exists(path):
                raise FileExistsError(errno.EEXIST, "somebody else wrote it first", path)
            else:
                self.fs.pipe_file(self.full(path), data, mode="create")
        return FileRef(path, hashlib.sha256(data).hexdigest(), len(data))

    def _create_on_disk(self, path: str, data: bytes) -> None:
        try:
            create_file(Path(self.full(path)), data)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreNotWritableError(
                    f"{self.uri(path)}: its file system has no hard links ({error.strerror}), so that two writers "
                    "could both commit. Give a --store on another disk, or an object store."
                ) from error
            raise

    def upload(self, local: Path, path: str) -> FileRef:
        """Copy a local file into the store."""
        if not self.is_local:  # no second copy on this machine's disk
            with as_store_errors(self.uri(path)):
                self._send(local, path)
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
            return self._change(ref, self._stat(ref.path))
        except FileNotFoundError:
            return "it is missing"

    def changed_below(self, folder: str, refs: Iterable[FileRef]) -> dict[str, str]:
        """The same for files below a folder, by path, those that changed; on S3 one request for all."""
        infos = self._infos_below(folder)
        changes = {
            ref.path: self._change(ref, _content(infos[ref.path])) if ref.path in infos else "it is missing"
            for ref in refs
        }
        return {path: change for path, change in changes.items() if change is not None}

    def _change(self, ref: FileRef, now: tuple[object, ...]) -> str | None:
        if now[0] != ref.bytes:
            return f"it has {now[0]} bytes, {ref.bytes} were written"
        return "another process wrote it since" if self._written.get(ref.path, now) != now else None

    def forget(self, folder: str) -> None:
        """Remember no longer what was written below a folder: it is committed, or gone."""
        for path in [path for path in self._written if path.startswith(f"{folder}/")]:
            del self._written[path]

    def identity(self, path: str) -> tuple[object, ...]:
        """What the file system knows of a file: another tuple once it was written again, even with the same content.

        Raises: FileNotFoundError.
        """
        if not self._is_s3:
            return self._stat(path)
        if (found := self.fs.look(self.full(path))) is None:
            raise FileNotFoundError(path)
        return tuple(found)

    def _stat(self, path: str) -> tuple[object, ...]:
        self.fs.invalidate_cache()
        return _content(self.fs.info(self.full(path)))

    def sha256(self, path: str) -> tuple[str, int]:
        """Hash and size of a file, read as a stream.

        Raises: TableIntegrityError if there is no such file.
        """
        digest, size = hashlib.sha256(), 0
        try:
            if (local := self.local(path)) is not None:
                return sha256_and_size(local)
            with self.open(path) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
        except FileNotFoundError as error:
            raise TableIntegrityError(f"{self.uri(path)}: missing. Restore it from backup.") from error
        return digest.hexdigest(), size

    def move_aside(self, path: str, aside: str) -> str:
        """Move a file or folder below `aside`, under a name that is free; return where it went.

        On an object store all is copied before anything is removed: a kill leaves two copies, never none.
        """
        number = len(self.names(aside))
        while self.exists(target := f"{aside}/{number:04d}-{path.replace('/', '_')}"):
            number += 1
        if self.is_local:
            Path(self.full(aside)).mkdir(parents=True, exist_ok=True)
            Path(self.full(path)).replace(self.full(target))
        else:
            found = self.files_below(path)
            copies = [target + one.removeprefix(path) for one in found]
            self.fs.copy([self.full(one) for one in found], [self.full(one) for one in copies])
            self.remove_folder(path)
        self.forget(path)
        return target

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.fs.rm_file(self.full(path))
        self.fs.invalidate_cache()
        self._written.pop(path, None)

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all below it; nothing happens if there is none."""
        if self._is_s3:
            # Records first: what is left by a kill is no whole iteration or version.
            found = sorted(self._infos_below(path), key=lambda one: (not one.endswith(".json"), one))
            self.fs.remove_objects([self.full(one) for one in found])
        elif self.exists(path):
            self.fs.rm(self.full(path), recursive=True)
            self.fs.invalidate_cache()
        self.forget(path)

    def local(self, path: str) -> Path | None:
        """The file or folder itself on a local store; None elsewhere."""
        return Path(self.full(path)) if self.is_local else None


def _content(info: Mapping[str, Any]) -> tuple[object, ...]:
    """What says that a file has other content. Not when it was written: an upload is not told that."""
    return tuple(str(info[name]).strip('"') if name == "ETag" else info.get(name) for name in _CONTENT if name in info)
