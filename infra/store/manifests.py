"""The commit record of an iteration. Written last; without it there is no iteration."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import AlreadyCommittedError, SchemaVersionError, StoreError, TableIntegrityError

MANIFEST_VERSION = 2


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """What an iteration did to a policy. `to_version == from_version` where there was nothing to train."""

    folder: str
    from_version: int
    to_version: int
    sha256: str  # of the version.json of `to_version`


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything an iteration is, by hash.

    Attributes:
        config_sha256: of the config file it ran with, under `configs/`.
        lineage_sha256: of the part of the config that decides the weights.
        code_version: version and content hash of the algorithm's package.
        parent_sha256: of the manifest before; None for iteration 0.
        files: path below the iteration's folder -> what was written there.
        policies: by policy name.
        cursor: where the next iteration's data begins.
        created_at: UTC, ISO 8601; given by the caller.
        writer: who committed, by a name that no other attempt has (see `writer`): of two that computed the same, the
            manifest tells which one won. None in manifests of version 1, which did not say.
    """

    run: str
    iteration: int
    config_sha256: str
    lineage_sha256: str
    code_version: str
    parent_sha256: str | None
    files: Mapping[str, FileRef]
    policies: Mapping[str, PolicyStep]
    cursor: DataCursor
    created_at: str
    writer: str | None
    schema_version: int = field(default=MANIFEST_VERSION)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return (json.dumps(asdict(self), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True)
class CommittedManifest:
    """A manifest as it stands in the store, with the hash of its bytes."""

    manifest: Manifest
    sha256: str


def commit_manifest(files: StoreFiles, manifest: Manifest) -> CommittedManifest:
    """Make the iteration exist.

    What can be checked without reading the tables again is: every file has the size that was written and is the one
    that this process wrote, every policy version is complete, and the manifest before is the parent.

    Raises:
        AlreadyCommittedError: somebody else committed this iteration; theirs stands.
        TableIntegrityError: what the manifest names is not what is there; nothing is committed.
    """
    data = manifest.to_bytes()
    path = layout.manifest_file(manifest.run, manifest.iteration)
    if not files.holds(path):  # else the error below says it better
        _check_before(files, manifest)
    try:
        ref = files.create(path, data)
    except FileExistsError as error:
        raise AlreadyCommittedError(
            f"{files.uri(path)}: iteration {manifest.iteration} of run {manifest.run!r} is committed already, by "
            f"{_winner(files, manifest)}. Theirs stands; start again to continue after it. This was {manifest.writer}."
        ) from error
    files.forget(layout.iteration_folder(manifest.run, manifest.iteration))
    return CommittedManifest(manifest, ref.sha256)


def _winner(files: StoreFiles, ours: Manifest) -> str:
    try:
        writer = read_manifest(files, ours.run, ours.iteration).manifest.writer
    except StoreError:
        writer = None
    return writer or "another process or an earlier attempt"


def _check_before(files: StoreFiles, manifest: Manifest) -> None:
    where = f"iteration {manifest.iteration} of run {manifest.run!r}"
    folder = layout.iteration_folder(manifest.run, manifest.iteration)
    for name, ref in manifest.files.items():
        if ref.path != f"{folder}/{name}":
            raise TableIntegrityError(f"{where}: {name} is at {ref.path}, expected {folder}/{name}. Nothing committed.")
    for path, change in files.changed_below(folder, manifest.files.values()).items():
        raise TableIntegrityError(
            f"{files.uri(path)}: {change}. Two processes may be writing {where}; nothing was committed. "
            "Stop one of them, and start again."
        )
    for policy, step in manifest.policies.items():
        record = layout.version_file(manifest.run, step.folder, step.to_version)
        if hashlib.sha256(files.read(record)).hexdigest() != step.sha256:
            raise TableIntegrityError(
                f"{files.uri(record)}: is another version {step.to_version} of policy {policy!r} than {where} made. "
                "Nothing was committed; start again."
            )
    if manifest.iteration:
        before = hashlib.sha256(files.read(layout.manifest_file(manifest.run, manifest.iteration - 1))).hexdigest()
    else:
        before = None
    if before != manifest.parent_sha256:
        raise TableIntegrityError(
            f"{where}: its parent is {(manifest.parent_sha256 or 'none')[:12]}, the manifest before it is "
            f"{(before or 'none')[:12]}. The run went on in another process; nothing was committed. Start again."
        )


def is_committed(files: StoreFiles, run: str, iteration: int) -> bool:
    """Whether the iteration exists: one look, no listing of iterations."""
    return iteration >= 0 and files.holds(layout.manifest_file(run, iteration))


def read_manifest(files: StoreFiles, run: str, iteration: int) -> CommittedManifest:
    """Raises:
    TableIntegrityError: missing, not JSON, or of another run or iteration.
    SchemaVersionError: written by a newer mgrpo.
    """
    path = layout.manifest_file(run, iteration)
    data = files.read(path)
    try:
        raw: dict[str, Any] = json.loads(data)
        version = int(raw["schema_version"])
        if version > MANIFEST_VERSION:
            raise SchemaVersionError(
                f"{files.uri(path)}: manifest version {version}, this mgrpo reads up to {MANIFEST_VERSION}. "
                "Install a newer mgrpo."
            )
        raw["files"] = {name: FileRef(**ref) for name, ref in raw["files"].items()}
        raw["policies"] = {name: PolicyStep(**step) for name, step in raw["policies"].items()}
        if version < 2:
            raw["writer"] = None
        raw["cursor"] = DataCursor(**raw["cursor"])
        manifest = Manifest(**raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableIntegrityError(f"{files.uri(path)}: is no manifest ({error}). Restore it from backup.") from error
    if (manifest.run, manifest.iteration) != (run, iteration):
        raise TableIntegrityError(
            f"{files.uri(path)}: is the manifest of iteration {manifest.iteration} of run {manifest.run!r}. "
            "The file was moved here; restore the right one."
        )
    return CommittedManifest(manifest, hashlib.sha256(data).hexdigest())


def newest_committed(files: StoreFiles, run: str) -> int:
    """The newest iteration; -1 without one. O(log n) requests: iterations are contiguous, so gallop, then halve."""
    if not is_committed(files, run, 0):
        return -1
    low, step = 0, 1
    while is_committed(files, run, low + step):
        low, step = low + step, step * 2
    high = low + step  # low exists, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_committed(files, run, middle) else (low, middle)
    return low
