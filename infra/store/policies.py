"""Policy versions: immutable folders, complete when their version.json exists."""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from mgrpo_core.errors import TableIntegrityError


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of a policy.

    Attributes:
        sha256: of its version.json, which names the hash of every file: one number for the whole version.
        parent_sha256: of the version it was made from; None for version 0.
        inputs_sha256: of everything the update consumed: version, tables, settings. The same inputs give this version.
    """

    policy: str
    folder: str
    version: int
    sha256: str
    parent_sha256: str | None
    inputs_sha256: str
    files: dict[str, FileRef]


def publish_version(
    files: StoreFiles,
    run: str,
    policy: str,
    folder: str,
    version: int,
    scratch: Path,
    *,
    parent_sha256: str | None,
    inputs_sha256: str,
) -> PolicyVersion:
    """Upload a local folder as a version; its version.json last. Nothing is overwritten.

    A complete version from the same inputs is returned as it is. One from other inputs, which no manifest can name yet,
    is moved aside first; so is what a killed upload left.
    """
    there = find_version(files, run, policy, folder, version)
    if there is not None and there.inputs_sha256 == inputs_sha256:
        return there
    place = layout.policy_folder(run, folder, version)
    if files.exists(place):
        files.move_aside(place, layout.aside_folder(run))
    uploaded = {
        path.name: files.upload(path, f"{place}/{path.name}") for path in sorted(scratch.iterdir()) if path.is_file()
    }
    record: dict[str, Any] = {
        "policy": policy,
        "folder": folder,
        "version": version,
        "parent_sha256": parent_sha256,
        "inputs_sha256": inputs_sha256,
        "files": {name: asdict(ref) for name, ref in uploaded.items()},
    }
    data = (json.dumps(record, sort_keys=True, indent=1) + "\n").encode()
    try:
        files.create(layout.version_file(run, folder, version), data)
    except FileExistsError:
        # Another process finished the same version meanwhile; the winner's record counts, and must be of these inputs.
        winner = find_version(files, run, policy, folder, version)
        if winner is None or winner.inputs_sha256 != inputs_sha256:
            raise
        return winner
    return PolicyVersion(
        policy, folder, version, hashlib.sha256(data).hexdigest(), parent_sha256, inputs_sha256, uploaded
    )


def find_version(files: StoreFiles, run: str, policy: str, folder: str, version: int) -> PolicyVersion | None:
    """The version if it is complete, else None.

    Raises:
        TableIntegrityError: its record cannot be read, or is of another policy or version.
    """
    path = layout.version_file(run, folder, version)
    if not files.exists(path):
        return None
    data = files.read(path)
    try:
        raw = json.loads(data)
        raw["files"] = {name: FileRef(**ref) for name, ref in raw["files"].items()}
        found = PolicyVersion(sha256=hashlib.sha256(data).hexdigest(), **raw)
    except (ValueError, TypeError, KeyError) as error:
        raise TableIntegrityError(f"{files.uri(path)}: is no version record ({error}). Restore it.") from error
    if (found.policy, found.version) != (policy, version):
        raise TableIntegrityError(
            f"{files.uri(path)}: is version {found.version} of policy {found.policy!r}, expected version {version} of "
            f"{policy!r}. The folder was moved; restore the right one."
        )
    return found


def require_version(files: StoreFiles, run: str, policy: str, folder: str, version: int) -> PolicyVersion:
    """Raises: TableIntegrityError where the version is missing or incomplete."""
    found = find_version(files, run, policy, folder, version)
    if found is None:
        raise TableIntegrityError(
            f"{files.uri(layout.policy_folder(run, folder, version))}: version {version} of policy {policy!r} is "
            "missing or incomplete. Restore it from backup, or go back to an earlier iteration."
        )
    return found


def version_faults(files: StoreFiles, found: PolicyVersion) -> list[str]:
    """What differs between a version's files and its record; every byte is read."""
    faults = []
    for name, ref in found.files.items():
        try:
            sha256, size = files.sha256(ref.path)
        except TableIntegrityError as error:
            faults.append(str(error))
            continue
        if (sha256, size) != (ref.sha256, ref.bytes):
            faults.append(
                f"{files.uri(ref.path)}: sha256 {sha256[:12]}, {size} bytes; the version's record says "
                f"{ref.sha256[:12]}, {ref.bytes} bytes. {name} changed after it was written; restore it."
            )
    return faults


def fetch_version(files: StoreFiles, found: PolicyVersion, cache: Path) -> Path:
    """The version as a local folder, verified by hash: the store's own on a local disk, else downloaded into `cache`.

    Raises:
        TableIntegrityError: a file differs from its record.
    """
    faults = version_faults(files, found) if files.is_local else []
    place = next(iter(found.files.values())).path.rsplit("/", 1)[0]
    target = files.local(place) or cache / found.folder / f"{found.version:08d}-{found.sha256[:12]}"
    if not files.is_local and not target.exists():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, ref in found.files.items():
            local = partial / name
            files.fs.get_file(files.full(ref.path), str(local))
            with local.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != ref.sha256:
                faults.append(
                    f"{files.uri(ref.path)}: downloaded sha256 {sha256[:12]}, its record says {ref.sha256[:12]}."
                )
        if not faults:
            partial.rename(target)
    if faults:
        raise TableIntegrityError("\n".join(faults))
    return target
