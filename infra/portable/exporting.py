"""Export: iterations of a run, with what replaying them needs, as a folder or an archive."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.portable.archives import is_archive, write_archive
from infra.portable.checked_copy import copy_checked
from infra.portable.places import folder_and_name, require_free
from infra.portable.selection import select
from infra.store import layout
from infra.store.export_record import ExportRecord
from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, find_run, open_store, require_run
from mgrpo_core.errors import ConfigError, RunConflictError


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds, and where it is."""

    record: ExportRecord
    target: str


def export_stored(
    store: str, run: str, target: str, *, iterations: Sequence[int] | None = None, policies: bool = True
) -> Exported:
    """Export a run by its name.

    Every file is hashed as it is copied. An archive appears when it is whole; a folder holds a whole export when its
    run's `run.json` is there, and the same call completes one that was interrupted.

    Args:
        store: its URL.
        run: its name.
        target: an archive, `….tar` or `….tar.zst`, or a folder, which then is a store of its own. A path or fsspec URL.
        iterations: which of them; None = all.
        policies: with the versions that replaying them needs.

    Raises:
        ConfigError: see `select`; or the target is there already.
        TableIntegrityError: a file is not what its record says.
        RunConflictError: the target folder holds something else under the run's name.
    """
    found = require_run(open_store(store), run)
    record = select(found, iterations, policies=policies)
    if is_archive(target):
        files, name = folder_and_name(target)
        require_free(files, name)
        with files.writing(name) as file:
            write_archive(file, name, record, found.files)
    else:
        _export_folder(found, record, StoreFiles(target))
    return Exported(record, target)


def _export_folder(run: StoredRun, record: ExportRecord, target: StoreFiles) -> None:
    if run.files.full(run.name) == target.full(run.name):
        raise ConfigError(f"{target.url}: is the store that the run is in. Give another folder, or a file .tar.zst.")
    ours = layout.export_file(run.name)
    if find_run(target, run.name) is not None or target.holds(ours):
        if not target.holds(ours) or target.read(ours) != record.to_bytes():
            raise RunConflictError(
                f"{target.uri(run.name)}: holds a run or another export, and is not replaced. Give another folder."
            )
    else:
        target.write(ours, record.to_bytes())
    for ref in record.copying_order():
        if target.holds(ref.path) and target.sha256(ref.path) == (ref.sha256, ref.bytes):
            continue  # of an export that was interrupted
        with run.files.open(ref.path) as source, target.writing(ref.path) as file:
            copy_checked(source, ref, run.files.uri(ref.path), file)
