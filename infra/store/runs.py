"""A training run in a store: opened, created, continued where its last whole iteration ends."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from infra.store import layout
from infra.store.export_record import named_iterations, read_partial
from infra.store.files import StoreFiles
from infra.store.manifests import CommittedManifest, is_committed, newest_committed, read_manifest
from infra.store.policies import require_base, require_version, version_faults
from infra.store.probe import probe
from infra.store.staging import clear_staging
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError, RunConflictError, SchemaVersionError, StoreError, TableIntegrityError

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


def open_store(url: str, *, single_writer: bool = False) -> StoreFiles:
    """The store at a folder or fsspec URL.

    Args:
        url: without credentials.
        single_writer: the config's `execution.single_writer`. Readers need not give it.

    Raises: StoreError if no file system answers to the URL, or if it holds credentials.
    """
    return StoreFiles(url, single_writer=single_writer)


def find_run(files: StoreFiles, name: str) -> StoredRun | None:
    """The run if it exists."""
    return StoredRun(files, name) if files.holds(layout.run_file(name)) else None


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
    probe(files, layout.run_folder(name))
    data = config.canonical_json().encode()
    config_sha256 = config.sha256()
    record = {
        "name": name,
        "schema_version": RUN_VERSION,
        "config_sha256": config_sha256,
        "lineage_sha256": config.lineage_sha256(),
    }
    try:
        files.create(layout.run_file(name), (json.dumps(record, sort_keys=True, indent=1) + "\n").encode())
    except FileExistsError:
        _refuse_partial(files, name)
        _check_lineage(files, name, config, accept_config_change)
    path = layout.config_file(name, config_sha256)
    if not files.holds(path):
        files.write(path, data)
    return StoredRun(files, name)


def newest_config(run: StoredRun) -> RunConfig:
    """The config of the newest iteration, or of the run's creation before there is one.

    Raises: TableIntegrityError if it is missing.
    """
    newest = newest_committed(run.files, run.name)
    if newest >= 0:
        sha256 = read_manifest(run.files, run.name, newest).manifest.config_sha256
        return read_config(run, sha256)
    return read_config(run, read_run_record(run.files, run.name).config_sha256)


def read_config(run: StoredRun, sha256: str) -> RunConfig:
    """Raises:
    TableIntegrityError: it is missing or differs from its hash.
    ConfigError: this mgrpo refuses it.
    """
    path = layout.config_file(run.name, sha256)
    data = run.files.read(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise TableIntegrityError(f"{run.files.uri(path)}: content differs from its name, its sha256. Restore it.")
    try:
        return RunConfig.model_validate_json(data)
    except ValidationError as error:
        told = "; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors(include_input=False))
        raise ConfigError(f"{run.files.uri(path)}: this mgrpo refuses the config. {told}") from None


def resume_point(run: StoredRun) -> ResumePoint:
    """The newest iteration whose manifest and policies verify; what is later is set aside, never deleted.

    Only the newest is checked byte by byte; `verify_run` checks them all. Clears what a kill right after a commit left
    in staging.

    Raises:
        TableIntegrityError: version 0 of a policy is damaged: there is nothing to go back to.
        SchemaVersionError: a newer mgrpo wrote the run.
    """
    files, warnings = run.files, list[str]()
    iteration = newest_committed(files, run.name)
    for later in _behind_a_gap(run, iteration):
        aside = _set_aside(run, layout.iteration_folder(run.name, later))
        warnings.append(f"iteration {iteration + 1} is missing; iteration {later} behind it was moved to {aside}.")
    while iteration >= 0:
        damage = _damage(run, iteration)
        if not damage:
            clear_staging(files, run.name, iteration)
            break
        aside = _set_aside(run, layout.iteration_folder(run.name, iteration))
        for version in sorted({one.version_folder for one in damage if one.version_folder}):
            if files.exists(version):
                _set_aside(run, version)
        what = " ".join(one.what for one in damage)
        warnings.append(f"iteration {iteration} is damaged and was moved to {aside}: {what}")
        iteration -= 1
    newest = read_manifest(files, run.name, iteration) if iteration >= 0 else None
    return ResumePoint(iteration + 1, newest, tuple(warnings))


def policy_versions(config: RunConfig, newest: CommittedManifest | None) -> Mapping[str, int]:
    """The version that each policy of the config has after `newest`."""
    if newest is None:
        return dict.fromkeys(config.policies, 0)
    steps = newest.manifest.policies
    return {name: steps[name].to_version if name in steps else 0 for name in config.policies}


@dataclass(frozen=True, slots=True)
class _Damage:
    """What is wrong with an iteration, and which policy version cannot be used again because of it."""

    what: str
    version_folder: str | None = None


def _damage(run: StoredRun, iteration: int) -> list[_Damage]:
    try:
        manifest = read_manifest(run.files, run.name, iteration).manifest
    except TableIntegrityError as error:
        return [_Damage(str(error))]
    damage: list[_Damage] = []
    for policy, step in manifest.policies.items():
        faults: list[str]
        damaged = step.to_version
        try:
            version = require_version(run.files, run.name, policy, step.folder, step.to_version)
            faults = version_faults(run.files, version)
            if not faults and version.base is not None:
                faults = version_faults(run.files, require_base(run.files, version, version.base))
                damaged = version.base.version if faults else damaged
            if version.sha256 != step.sha256:
                faults.append(f"policy {policy!r} version {step.to_version} is another than the manifest's.")
        except TableIntegrityError as error:
            faults = [str(error)]
        if faults and damaged == 0:
            raise TableIntegrityError(
                f"version 0 of policy {policy!r} is damaged, and every iteration stands on it: {' '.join(faults)} "
                "Nothing was changed."
            )
        folder = layout.policy_folder(run.name, step.folder, damaged)
        damage.extend(_Damage(fault, folder) for fault in faults)
    return damage


def _behind_a_gap(run: StoredRun, newest: int) -> list[int]:
    """Iterations that can no longer be reached because one before them is missing.

    Looks at newest + 2, + 3, + 5, + 9, …: any gap with at least as many iterations behind it is met, in O(log n)
    requests; only then are folders listed.
    """
    step = 1
    while step <= 2 * (newest + 2):
        if is_committed(run.files, run.name, newest + 1 + step):
            names = run.files.names(layout.iterations_folder(run.name))
            later = [int(name) for name in names if name.isdecimal() and int(name) > newest + 1]
            # Some object stores keep the name of a folder whose files were moved away.
            return [one for one in later if run.files.exists(layout.iteration_folder(run.name, one))]
        step *= 2
    return []


def _set_aside(run: StoredRun, path: str) -> str:
    return run.files.uri(run.files.move_aside(path, layout.aside_folder(run.name)))


def _refuse_partial(files: StoreFiles, name: str) -> None:
    partial = read_partial(files, name)
    if partial is not None:
        raise RunConflictError(
            f"run {name!r} in {files.url} is a part of a run: iterations {named_iterations(partial.iterations)}"
            f"{'' if partial.policies else ', without policies'}. It can be read and replayed, not continued. Give "
            "another name with --run, or import the whole run."
        )


def _check_lineage(files: StoreFiles, name: str, config: RunConfig, accept: bool) -> None:
    lineage = read_run_record(files, name).lineage_sha256
    newest = newest_committed(files, name)
    if newest >= 0:
        lineage = read_manifest(files, name, newest).manifest.lineage_sha256
    if lineage != config.lineage_sha256() and not accept:
        raise RunConflictError(
            f"run {name!r} in {files.url} is in use with another config (lineage {lineage[:12]}, this config "
            f"{config.lineage_sha256()[:12]}). Give the config it was started with, another name with --run, or "
            "--accept-config-change to continue it under this one."
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `run.json` says of the run's creation."""

    name: str
    config_sha256: str
    lineage_sha256: str


def read_run_record(files: StoreFiles, name: str) -> RunRecord:
    """Raises:
    TableIntegrityError: it is missing, is none, or is of another run.
    SchemaVersionError: written by a newer mgrpo.
    """
    path = layout.run_file(name)
    data = files.read(path)
    try:
        raw = json.loads(data)
        version = int(raw.pop("schema_version"))
        if version > RUN_VERSION:
            raise SchemaVersionError(
                f"{files.uri(path)}: version {version}, this mgrpo reads up to {RUN_VERSION}. Install a newer mgrpo."
            )
        record = RunRecord(**raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableIntegrityError(f"{files.uri(path)}: is no run record ({error}). Restore it.") from error
    if record.name != name:
        raise TableIntegrityError(f"{files.uri(path)}: is of run {record.name!r}. The folder was renamed; undo that.")
    return record


def _is_run(files: StoreFiles, name: str) -> bool:
    try:
        return files.holds(layout.run_file(name))
    except ValueError:  # no run name
        return False
