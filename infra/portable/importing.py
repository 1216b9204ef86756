"""Import: an export into a store, all of it or nothing, and only once every byte and link was verified."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infra.portable.archives import is_archive, open_archive
from infra.portable.checked_copy import copy_checked
from infra.portable.places import folder_and_name
from infra.store import layout
from infra.store.export_record import ExportRecord, parse_record
from infra.store.files import FileRef, StoreFiles
from infra.store.runs import StoredRun, find_run, open_store, read_run_record, run_names
from infra.store.verify import Verification, verify_run
from mgrpo_core.errors import ConfigError, RunConflictError, StoreNotWritableError, TableIntegrityError

_FAULTS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported, and where it is."""

    record: ExportRecord
    verification: Verification
    uri: str


def import_export(source: str, store: str, *, run: str | None = None) -> Imported:
    """Import a run, or the part of one that an export holds, under its own name: ids are made of it.

    All is copied to a place that no reader looks at, verified there as `mgrpo verify` does, and then moved to its
    place, `run.json` last. An import that was interrupted leaves that place behind, and the same call goes on from it.

    Args:
        source: an archive or folder that `export_stored` made; a path or fsspec URL.
        store: where to.
        run: which of a folder's exports; None = the only one.

    Raises:
        ConfigError: there is no export, or there are several.
        RunConflictError: the store has a run of that name.
        TableIntegrityError: it is not whole, or not what it says of itself; the store is as it was.
        StoreNotWritableError: no space or permission.
    """
    files = open_store(store)
    with _opened(source, run) as (record, data, members):
        staging = layout.import_folder(hashlib.sha256(data).hexdigest()[:16])
        waiting = StoreFiles(files.uri(staging))
        if (found := find_run(files, record.run)) is not None:
            if not files.exists(staging):
                raise RunConflictError(
                    f"{files.uri(record.run)}: the store has a run of that name, and ids are made of the name, so it "
                    "cannot be given another. Import into another --store."
                )
            files.remove_folder(staging)  # an import that was interrupted after its last step but this one
            return Imported(record, verify_run(found), found.uri)
        _require_place(files, record)
        for ref, opened in members:
            if not (waiting.holds(ref.path) and waiting.sha256(ref.path) == (ref.sha256, ref.bytes)):
                with waiting.writing(ref.path) as file:
                    copy_checked(opened, ref, f"{source}:{ref.path}", file)
    waiting.write(layout.export_file(record.run), data)
    verification = _verified(waiting, record, source, files, staging)
    _publish(files, waiting, staging, record)
    return Imported(record, verification, files.uri(record.run))


def _verified(waiting: StoreFiles, record: ExportRecord, source: str, files: StoreFiles, staging: str) -> Verification:
    run = StoredRun(waiting, record.run)
    read_run_record(waiting, record.run)
    found = verify_run(run)
    faults = [f"iteration {one.iteration}, {one.where}: {one.what}" for one in found.faults]
    if found.iterations != len(record.iterations):
        faults.append(f"it holds {found.iterations} iterations, its record says {len(record.iterations)}.")
    if faults:
        files.remove_folder(staging)
        told = "\n".join(f"  - {fault}" for fault in faults[:_FAULTS_TOLD])
        raise TableIntegrityError(f"{source}: {len(faults)} faults. Nothing was imported.\n{told}")
    return found


def _publish(files: StoreFiles, waiting: StoreFiles, staging: str, record: ExportRecord) -> None:
    """Make the run appear."""
    if record.whole:  # a run like any other, which may go on
        waiting.remove(layout.export_file(record.run))
    place = layout.run_folder(record.run)
    if (target := files.local(place)) is not None:
        source = Path(files.full(f"{staging}/{place}"))
        try:
            source.rename(target)  # refuses to replace a folder that holds something
        except OSError as error:
            raise RunConflictError(
                f"{files.uri(place)}: cannot take its place ({error.strerror}). Another process may have made a run of "
                "that name meanwhile."
            ) from None
    else:
        order = record.copying_order()
        extra = [] if record.whole else [layout.export_file(record.run)]
        for path in [*extra, *(ref.path for ref in order[:-1])]:
            files.fs.copy(files.full(f"{staging}/{path}"), files.full(path))
        try:
            files.create(order[-1].path, waiting.read(order[-1].path))
        except FileExistsError:
            raise RunConflictError(
                f"{files.uri(place)}: another process made a run of that name meanwhile. Import into another --store."
            ) from None
    files.remove_folder(staging)


def _require_place(files: StoreFiles, record: ExportRecord) -> None:
    """Room for it, and nothing in its place but what the same import left there."""
    for path in files.files_below(record.run):
        name = path.removeprefix(f"{record.run}/")
        if files.is_local or (name not in record.files and name != "export.json"):
            raise RunConflictError(
                f"{files.uri(path)}: is of no run, and in the way. Remove {files.uri(record.run)} if nothing "
                "else needs it, or import into another --store."
            )
    if files.is_local:
        root = Path(files.root)
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if record.total_bytes > free:
            raise StoreNotWritableError(
                f"{files.url}: the export has {record.total_bytes} bytes, the disk {free} free. Give another --store."
            )


@contextmanager
def _opened(source: str, run: str | None) -> Iterator[tuple[ExportRecord, bytes, Iterator[tuple[FileRef, BinaryIO]]]]:
    if is_archive(source):
        files, name = folder_and_name(source)
        try:
            packed = int(files.fs.info(files.full(name))["size"])
            opened = files.open(name)
        except FileNotFoundError:
            raise ConfigError(
                f"{source}: there is no such file. Give an archive or folder of `mgrpo export`."
            ) from None
        with opened, open_archive(opened, source, packed) as (record, data, members):
            if run not in (None, record.run):
                raise ConfigError(f"{source}: holds run {record.run!r}, not {run!r}.")
            yield record, data, iter(members)
        return
    files = StoreFiles(source)
    path = layout.export_file(run or _only_export(files))
    if not files.holds(path):
        raise ConfigError(
            f"{files.uri(path)}: there is no such export. Exports there: {', '.join(_exports(files)) or 'none'}."
        )
    data = files.read(path)
    record = parse_record(data, files.uri(path))
    if layout.export_file(record.run) != path:
        raise TableIntegrityError(f"{files.uri(path)}: is of run {record.run!r}. The folder was renamed; undo that.")
    yield record, data, _files_of(files, record)


def _only_export(files: StoreFiles) -> str:
    found = _exports(files)
    if len(found) != 1:
        there = (
            f"several: {', '.join(found)}. Name one with --run"
            if found
            else "none. Give an archive or folder of `mgrpo export`"
        )
        raise ConfigError(f"{files.url}: expected one export there, found {there}.")
    return found[0]


def _exports(files: StoreFiles) -> list[str]:
    return [name for name in run_names(files) if files.holds(layout.export_file(name))]


def _files_of(files: StoreFiles, record: ExportRecord) -> Iterator[tuple[FileRef, BinaryIO]]:
    root = Path(files.root).resolve() if files.is_local else None
    for ref in record.copying_order():
        # A link anywhere on the way could lead to any file of this machine.
        if root is not None and Path(files.full(ref.path)).resolve() != root / ref.path:
            raise TableIntegrityError(f"{files.uri(ref.path)}: is a link, or in a linked folder. Nothing was imported.")
        try:
            opened = files.open(ref.path)
        except (FileNotFoundError, IsADirectoryError):
            raise TableIntegrityError(
                f"{files.uri(ref.path)}: missing. Nothing was imported; export it again."
            ) from None
        with opened:
            yield ref, opened
