"""A training run in a store: opened, created, continued where its last whole iteration ends."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.manifests import CommittedManifest, newest_committed, read_manifest
from infra.store.policies import require_version, version_faults
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import RunConflictError, SchemaVersionError, StoreError, TableIntegrityError

RUN_VERSION = 1


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run continues.

    Attributes:
        iteration: the next one to compute.
        newest: the manifest before it; None at the start of a run.
        warnings: what was damaged and set aside on the way here, for people.
    """

    iteration: int
    newest: CommittedManifest | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's place in a store."""

    files: StoreFiles
    name: str

    @property
    def uri(self) -> str:
        return self.files.uri(self.name)


def open_store(url: str) -> StoreFiles:
    """The store at a folder or fsspec URL.

    Raises: StoreError if no file system answers to it.
    """
    return StoreFiles(url)


def find_run(files: StoreFiles, name: str) -> StoredRun | None:
    """The run if it exists."""
    return StoredRun(files, name) if files.exists(layout.run_file(name)) else None


def require_run(files: StoreFiles, name: str) -> StoredRun:
    """Raises: StoreError naming the runs that there are."""
    run = find_run(files, name)
    if run is None:
        there = ", ".join(run_names(files)) or "none"
        raise StoreError(f"{files.url}: no run {name!r}. Runs there: {there}. Give another run, or --store.")
    return run


def run_names(files: StoreFiles) -> list[str]:
    """Names of the store's runs, sorted."""
    return [name for name in files.names("") if _is_run(files, name)]


def create_or_open_run(
    files: StoreFiles, name: str, config: RunConfig, *, accept_config_change: bool = False
) -> StoredRun:
    """The run `name`, created if it is new; its config is kept under `configs/`.

    Raises:
        StoreNotWritableError: before anything else is done.
        RunConflictError: the name is in use with a config that decides other weights.
    """
    files.probe_writable(layout.run_folder(name))
    record = {"name": name, "schema_version": RUN_VERSION, "lineage_sha256": config.lineage_sha256()}
    try:
        files.create(layout.run_file(name), (json.dumps(record, sort_keys=True, indent=1) + "\n").encode())
    except FileExistsError:
        _check_lineage(files, name, config, accept_config_change)
    data = config.canonical_json().encode()
    path = layout.config_file(name, hashlib.sha256(data).hexdigest())
    if not files.exists(path):
        files.write(path, data)
    return StoredRun(files, name)


def newest_config(run: StoredRun) -> RunConfig:
    """The config of the newest iteration, or of the run's creation before there is one.

    Raises: StoreError if none is kept.
    """
    newest = newest_committed(run.files, run.name)
    if newest >= 0:
        sha256 = read_manifest(run.files, run.name, newest).manifest.config_sha256
        return read_config(run, sha256)
    names = run.files.names(f"{run.name}/configs")
    if not names:
        raise StoreError(f"{run.uri}: holds no config. Start it with `mgrpo train`.")
    return read_config(run, names[0].removesuffix(".json"))


def read_config(run: StoredRun, sha256: str) -> RunConfig:
    """Raises: TableIntegrityError if it is missing or differs from its hash."""
    path = layout.config_file(run.name, sha256)
    data = run.files.read(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise TableIntegrityError(f"{run.files.uri(path)}: content differs from its name, its sha256. Restore it.")
    return RunConfig.model_validate_json(data)


def resume_point(run: StoredRun) -> ResumePoint:
    """The newest iteration whose manifest and policies verify; what is later is set aside, never deleted.

    Only the newest is checked byte by byte; `verify` checks them all.
    """
    warnings: list[str] = []
    iteration = newest_committed(run.files, run.name)
    while iteration >= 0:
        faults = _faults(run, iteration)
        if not faults:
            break
        aside = run.files.move_aside(layout.iteration_folder(run.name, iteration), layout.aside_folder(run.name))
        warnings.append(f"iteration {iteration} is damaged and was moved to {run.files.uri(aside)}: {' '.join(faults)}")
        iteration -= 1
    newest = read_manifest(run.files, run.name, iteration) if iteration >= 0 else None
    return ResumePoint(iteration + 1, newest, tuple(warnings))


def policy_versions(config: RunConfig, newest: CommittedManifest | None) -> Mapping[str, int]:
    """The version that each policy of the config has after `newest`."""
    if newest is None:
        return dict.fromkeys(config.policies, 0)
    steps = newest.manifest.policies
    return {name: steps[name].to_version if name in steps else 0 for name in config.policies}


def _faults(run: StoredRun, iteration: int) -> list[str]:
    try:
        manifest = read_manifest(run.files, run.name, iteration).manifest
        faults = []
        for policy, step in manifest.policies.items():
            version = require_version(run.files, run.name, policy, step.folder, step.to_version)
            if version.sha256 != step.sha256:
                faults.append(f"policy {policy!r} version {step.to_version} is another than the manifest's.")
            faults.extend(version_faults(run.files, version))
        return faults
    except SchemaVersionError:
        raise  # not damage: a newer mgrpo wrote it
    except TableIntegrityError as error:
        return [str(error)]


def _check_lineage(files: StoreFiles, name: str, config: RunConfig, accept: bool) -> None:
    path = layout.run_file(name)
    try:
        record = json.loads(files.read(path))
        version, lineage = int(record["schema_version"]), record["lineage_sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise TableIntegrityError(f"{files.uri(path)}: is no run record ({error}). Restore it.") from error
    if version > RUN_VERSION:
        raise SchemaVersionError(f"{files.uri(path)}: version {version}, this mgrpo reads up to {RUN_VERSION}.")
    newest = newest_committed(files, name)
    if newest >= 0:
        lineage = read_manifest(files, name, newest).manifest.lineage_sha256
    if lineage != config.lineage_sha256() and not accept:
        raise RunConflictError(
            f"run {name!r} in {files.url} is in use with another config (lineage {lineage[:12]}, this config "
            f"{config.lineage_sha256()[:12]}). Give the config it was started with, another name with --run, or "
            "--accept-config-change to continue it under this one."
        )


def _is_run(files: StoreFiles, name: str) -> bool:
    try:
        return files.exists(layout.run_file(name))
    except ValueError:  # no run name
        return False
