"""Which files of a run an export takes: those that verifying and replaying its iterations needs, and no other."""

import hashlib
from collections.abc import Iterator, Sequence

from infra.store import layout
from infra.store.export_record import ExportRecord, named_iterations, read_partial
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import read_manifest
from infra.store.policies import require_base, require_version
from infra.store.runs import StoredRun, read_config, read_run_record
from infra.store.sampled_by import versions_that_sampled
from infra.store.stored_iteration import committed_iterations
from mgrpo_core.errors import ConfigError


def select(run: StoredRun, iterations: Sequence[int] | None, *, policies: bool) -> ExportRecord:
    """The record of an export.

    Sizes and hashes are those of the manifests and version records; only small files are read.

    Args:
        run: where it is.
        iterations: which of them; None = all.
        policies: with the versions that replaying them needs.

    Raises:
        ConfigError: an iteration is not committed, nothing is, a config holds a credential, or the run is an export
            without its policies.
        TableIntegrityError: a manifest, config or version record is damaged.
    """
    there = committed_iterations(run)
    chosen = tuple(sorted(set(iterations or there)))
    for one in chosen:
        if one not in there:
            raise ConfigError(
                f"iteration {one} of run {run.name!r} is not committed. Committed: {named_iterations(there)}."
            )
    if not chosen:
        raise ConfigError(f"run {run.name!r} has no committed iteration yet, so there is nothing to export.")
    partial = read_partial(run.files, run.name)
    if policies and partial is not None and not partial.policies:
        raise ConfigError(f"run {run.name!r} is an export without policies. Give --no-policies.")
    found: dict[str, FileRef] = {}
    for ref in _refs(run, chosen, policies=policies):
        found[ref.path.removeprefix(f"{run.name}/")] = ref
    return ExportRecord(run.name, chosen, policies, found)


def _refs(run: StoredRun, iterations: Sequence[int], *, policies: bool) -> Iterator[FileRef]:
    files, name = run.files, run.name
    yield _whole(files, layout.run_file(name))
    configs = {read_run_record(files, name).config_sha256}
    evaluated = {path: int(path.rsplit("/", 1)[-1].partition("-")[0]) for path in _evaluations(run)}
    for iteration in iterations:
        manifest = read_manifest(files, name, iteration).manifest
        yield _whole(files, layout.manifest_file(name, iteration))
        yield from manifest.files.values()
        configs.add(manifest.config_sha256)
        config = read_config(run, manifest.config_sha256)
        tables = [ref.path for place, ref in manifest.files.items() if place.startswith("trajectories/")]
        yield from (_whole(files, path) for path, after in evaluated.items() if after in (iteration + 1, iteration))
        for policy, step in manifest.policies.items() if policies else ():
            versions = {step.from_version, step.to_version} | ({0} if config.loss.kl.coefficient else set())
            versions |= set(versions_that_sampled(files, tables, policy))
            for version in sorted(versions):
                yield from _version(run, policy, step.folder, version)
    for sha256 in configs:
        read_config(run, sha256)
        yield _whole(files, layout.config_file(name, sha256))


def _version(run: StoredRun, policy: str, folder: str, version: int) -> Iterator[FileRef]:
    found = require_version(run.files, run.name, policy, folder, version)
    yield _whole(run.files, layout.version_file(run.name, folder, version))
    yield from found.files.values()
    if found.base is not None:
        base = require_base(run.files, found, found.base)
        yield _whole(run.files, layout.version_file(run.name, folder, base.version))
        yield from base.files.values()


def _evaluations(run: StoredRun) -> list[str]:
    folder = layout.evaluations_folder(run.name)
    return [f"{folder}/{name}" for name in run.files.names(folder) if name.partition("-")[0].isdecimal()]


def _whole(files: StoreFiles, path: str) -> FileRef:
    """A small file that no record names by its hash."""
    data = files.read(path)
    return FileRef(path, hashlib.sha256(data).hexdigest(), len(data))
