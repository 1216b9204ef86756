"""Policy versions: immutable folders, complete when their version.json exists."""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from infra.store import layout
from infra.store.adapter_folder import lay_on_base
from infra.store.files import FileRef, StoreFiles
from mgrpo_core.errors import AlreadyCommittedError, SchemaVersionError, TableIntegrityError

VERSION_SCHEMA = 2
"""2: a version may be an adapter on a base. A version that holds all weights is still written as 1."""


@dataclass(frozen=True, slots=True)
class PolicyBase:
    """The version of the same policy that an adapter lies on, by number and by the hash that stands for its files."""

    version: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of a policy.

    Attributes:
        sha256: of its version.json, which names the hash of every file: one number for the whole version.
        parent_sha256: of the version it was made from; None for version 0.
        inputs_sha256: of everything the update consumed: version, tables, settings. The same inputs give this version.
        base: of an adapter; None for a version that holds all weights.
    """

    run: str
    policy: str
    folder: str
    version: int
    sha256: str
    parent_sha256: str | None
    inputs_sha256: str
    files: dict[str, FileRef]
    base: PolicyBase | None = None


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
    base: PolicyBase | None = None,
) -> PolicyVersion:
    """Upload a local folder, all levels, as a version; its version.json last. Nothing is overwritten.

    A sound version from the same inputs is returned as it is: no second optimiser step. One from other inputs, which no
    manifest can name yet, is moved aside first; so is a damaged one, and what a killed upload left.

    Raises:
        AlreadyCommittedError: another process finished this version from other inputs meanwhile; theirs stands.
        TableIntegrityError: the local folder is empty.
    """
    there = find_sound_version(files, run, policy, folder, version)
    if there is not None and there.inputs_sha256 == inputs_sha256:
        return there
    place = layout.policy_folder(run, folder, version)
    if files.exists(place):
        files.move_aside(place, layout.aside_folder(run))
    found = {path.relative_to(scratch).as_posix(): path for path in sorted(scratch.rglob("*")) if path.is_file()}
    if not found:
        raise TableIntegrityError(f"{scratch}: holds no file, expected the weights of policy {policy!r}. Save them.")
    uploaded = {name: files.upload(path, f"{place}/{name}") for name, path in found.items()}
    files.forget(place)
    record: dict[str, Any] = {
        "schema_version": VERSION_SCHEMA if base else 1,
        "policy": policy,
        "folder": folder,
        "version": version,
        "parent_sha256": parent_sha256,
        "inputs_sha256": inputs_sha256,
        "files": {name: asdict(ref) for name, ref in uploaded.items()},
        **({"base": asdict(base)} if base else {}),
    }
    data = (json.dumps(record, sort_keys=True, indent=1) + "\n").encode()
    try:
        files.create(layout.version_file(run, folder, version), data)
    except FileExistsError as error:
        winner = find_sound_version(files, run, policy, folder, version)
        if winner is None or winner.inputs_sha256 != inputs_sha256:
            raise AlreadyCommittedError(
                f"{files.uri(place)}: another process wrote version {version} of policy {policy!r} meanwhile, from "
                "other inputs. Two processes train this run; stop one of them, and start again."
            ) from error
        return winner
    sha256 = hashlib.sha256(data).hexdigest()
    return PolicyVersion(run, policy, folder, version, sha256, parent_sha256, inputs_sha256, uploaded, base)


def find_sound_version(files: StoreFiles, run: str, policy: str, folder: str, version: int) -> PolicyVersion | None:
    """The version if it is complete and every byte is as its record says, else None."""
    try:
        found = find_version(files, run, policy, folder, version)
    except SchemaVersionError:
        raise
    except TableIntegrityError:
        return None
    return None if found is None or version_faults(files, found) else found


def find_version(files: StoreFiles, run: str, policy: str, folder: str, version: int) -> PolicyVersion | None:
    """The version if it is complete, else None.

    Raises:
        TableIntegrityError: its record cannot be read, or is of another policy or version.
        SchemaVersionError: written by a newer mgrpo.
    """
    path = layout.version_file(run, folder, version)
    if not files.holds(path):
        return None
    data = files.read(path)
    try:
        raw = json.loads(data)
        schema_version = int(raw.pop("schema_version", 1))
        if schema_version > VERSION_SCHEMA:
            raise SchemaVersionError(
                f"{files.uri(path)}: record version {schema_version}, this mgrpo reads up to {VERSION_SCHEMA}. "
                "Install a newer mgrpo."
            )
        raw["files"] = {name: FileRef(**ref) for name, ref in raw["files"].items()}
        raw["base"] = PolicyBase(**raw["base"]) if "base" in raw else None
        found = PolicyVersion(run=run, sha256=hashlib.sha256(data).hexdigest(), **raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableIntegrityError(f"{files.uri(path)}: is no version record ({error}). Restore it.") from error
    if (found.policy, found.version) != (policy, version):
        raise TableIntegrityError(
            f"{files.uri(path)}: is version {found.version} of policy {found.policy!r}, expected version {version} of "
            f"{policy!r}. The folder was moved; restore the right one."
        )
    place = layout.policy_folder(run, folder, version)
    for name, ref in found.files.items():
        if ".." in PurePosixPath(name).parts or ref.path != f"{place}/{name}":
            raise TableIntegrityError(
                f"{files.uri(path)}: names the file {name!r} at {ref.path}, outside its folder. Restore the record."
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


def require_base(files: StoreFiles, found: PolicyVersion, base: PolicyBase) -> PolicyVersion:
    """The version that an adapter lies on. Raises: TableIntegrityError where it is missing, or was replaced."""
    there = require_version(files, found.run, found.policy, found.folder, base.version)
    if there.sha256 != base.sha256:
        raise TableIntegrityError(
            f"{files.uri(layout.policy_folder(found.run, found.folder, base.version))}: is {there.sha256[:12]}, but "
            f"version {found.version} of policy {found.policy!r} is an adapter on {base.sha256[:12]}. The base was "
            "replaced; restore it from backup."
        )
    return there


def version_faults(
    files: StoreFiles, found: PolicyVersion, sha256_of: Callable[[str], tuple[str, int]] | None = None
) -> list[str]:
    """What differs between a version's files and its record; every byte is read, of a base its record.

    Args:
        files: the store.
        found: the version.
        sha256_of: hash and size of a file by its path; None = read here, one after the other.
    """
    faults = []
    if found.base is not None:
        try:
            require_base(files, found, found.base)
        except TableIntegrityError as error:
            faults.append(str(error))
    for name, ref in found.files.items():
        try:
            sha256, size = (sha256_of or files.sha256)(ref.path)
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

    An adapter gets a folder in `cache` in any case, with its base below it (see `adapter_folder`).

    Raises:
        TableIntegrityError: a file differs from its record, or an adapter's base is missing or another.
    """
    place = next(iter(found.files.items()))
    folder = place[1].path.removesuffix(f"/{place[0]}")
    if (own := files.local(folder)) is not None:
        if faults := version_faults(files, found):
            raise TableIntegrityError("\n".join(faults))
    else:
        own = _made_once(_cached(found, cache), lambda target: _download(files, found, target))
    if found.base is None:
        return own
    base, names = _fetch_base(files, require_base(files, found, found.base), cache), tuple(found.files)
    return _made_once(_cached(found, cache, "-on-base"), lambda target: lay_on_base(target, own, names, base))


def _fetch_base(files: StoreFiles, base: PolicyVersion, cache: Path) -> Path:
    """Verified once in a cache, for all the adapters on it: it is large, and they are small."""
    place = _cached(base, cache)
    if not place.exists() and (own := fetch_version(files, base, cache)) != place:
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            place.symlink_to(own.absolute(), target_is_directory=True)
    return place


def _cached(found: PolicyVersion, cache: Path, suffix: str = "") -> Path:
    return cache / found.folder / f"{found.version:08d}-{found.sha256[:12]}{suffix}"


def _made_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """A folder that is there whole or not at all."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own: several ranks of one machine may make the same one.
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
        try:
            fill(partial)
            partial.rename(target)
        except OSError:
            if not target.exists():  # else another process was first, with the same verified bytes
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _download(files: StoreFiles, found: PolicyVersion, target: Path) -> None:
    for name, ref in found.files.items():
        sha256 = files.download(ref.path, target / name)
        if sha256 != ref.sha256:
            raise TableIntegrityError(
                f"{files.uri(ref.path)}: downloaded sha256 {sha256[:12]}, its record says {ref.sha256[:12]}. "
                f"{name} changed after it was written; restore it."
            )
