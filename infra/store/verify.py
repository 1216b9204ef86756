"""Is a run whole? Every file, row and link against the manifests; every fault named, and what is still usable."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from infra.store import layout
from infra.store.files import FileRef
from infra.store.manifests import CommittedManifest, Manifest, PolicyStep, newest_committed, read_manifest
from infra.store.policies import PolicyVersion, require_version, version_faults
from infra.store.runs import StoredRun, read_config
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import read_table
from mgrpo_core.errors import StoreError, TableIntegrityError

_SMALL = {"queries": QUERIES, "rewards": REWARDS, "alignment": ALIGNMENT, "advantages": ADVANTAGES}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as the manifests say."""

    iteration: int
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what is wrong.

    Attributes:
        iterations: committed ones.
        usable_through: the newest iteration up to which the whole chain is sound; -1 if none is.
    """

    run: str
    iterations: int
    files: int
    bytes: int
    faults: tuple[Fault, ...]
    usable_through: int

    @property
    def sound(self) -> bool:
        return not self.faults


def verify_run(run: StoredRun) -> Verification:
    """Check hashes, sizes, row counts, schemas, the chain of manifests, links between tables, and policy versions.

    Raises: SchemaVersionError, StoreError: the run is of a newer mgrpo, or there is none.
    """
    faults: list[Fault] = []
    newest = newest_committed(run.files, run.name)
    later = _orphans(run, newest)
    faults.extend(later)
    count = size = 0
    parent: CommittedManifest | None = None
    for iteration in range(newest + 1):
        found = _Iteration(run, iteration)
        parent = found.check(parent)
        faults.extend(found.faults)
        count += found.files
        size += found.bytes
    broken = [fault.iteration for fault in faults]
    usable = min(broken, default=newest + 1) - 1
    return Verification(run.name, newest + 1, count, size, tuple(faults), usable)


def _orphans(run: StoredRun, newest: int) -> Iterable[Fault]:
    """Manifests behind a gap: an iteration that is missing hides all after it."""
    for name in run.files.names(layout.iterations_folder(run.name)):
        if name.isdigit() and int(name) > newest + 1 and run.files.holds(layout.manifest_file(run.name, int(name))):
            yield Fault(
                newest + 1, name, f"iteration {newest + 1} is missing, although {int(name)} is committed. Restore it."
            )


class _Iteration:
    """The check of one iteration."""

    def __init__(self, run: StoredRun, iteration: int) -> None:
        self._run = run
        self._iteration = iteration
        self.faults: list[Fault] = []
        self.files = 0
        self.bytes = 0

    def check(self, parent: CommittedManifest | None) -> CommittedManifest | None:
        """Returns the manifest for the next one's check; None where it cannot be read."""
        run = self._run
        try:
            committed = read_manifest(run.files, run.name, self._iteration)
        except TableIntegrityError as error:
            self._fault("manifest.json", str(error))
            return None
        manifest = committed.manifest
        before = parent.sha256 if parent else None
        if (self._iteration == 0 or parent is not None) and manifest.parent_sha256 != before:
            self._fault(
                "manifest.json",
                f"its parent is {(manifest.parent_sha256 or 'none')[:12]}, the manifest before it is "
                f"{(before or 'none')[:12]}. One of the two was replaced, or their order changed.",
            )
        try:
            read_config(run, manifest.config_sha256)
        except (TableIntegrityError, ValueError) as error:
            self._fault("config", str(error))
        whole = [self._same_bytes(name, ref) for name, ref in manifest.files.items()]
        self._strangers(manifest)
        if all(whole):
            self._links(manifest.files)
        self._policies(committed, parent)
        return committed

    def _fault(self, where: str, what: str) -> None:
        self.faults.append(Fault(self._iteration, where, what))

    def _strangers(self, manifest: Manifest) -> None:
        """Tables that no manifest names: a query over the folder would read them too."""
        folder = layout.iteration_folder(manifest.run, manifest.iteration)
        staging = layout.staging_folder(manifest.run, manifest.iteration)
        for path in self._run.files.files_below(folder):
            name = path.removeprefix(f"{folder}/")
            if name != "manifest.json" and name not in manifest.files and not path.startswith(f"{staging}/"):
                self._fault(name, "is not in the manifest. Move it out of the run: queries over the folder read it.")

    def _same_bytes(self, name: str, ref: FileRef) -> bool:
        if ref.path != f"{layout.iteration_folder(self._run.name, self._iteration)}/{name}":
            self._fault(name, f"the manifest places it at {ref.path}, outside this iteration. Restore the manifest.")
            return False
        try:
            sha256, size = self._run.files.sha256(ref.path)
        except TableIntegrityError as error:
            self._fault(name, str(error))
            return False
        self.files += 1
        self.bytes += size
        if (sha256, size) != (ref.sha256, ref.bytes):
            self._fault(
                name,
                f"sha256 {sha256[:12]}, {size} bytes; the manifest says {ref.sha256[:12]}, {ref.bytes}. The file "
                "changed after it was committed; restore it from backup.",
            )
            return False
        return True

    def _table(self, files: Mapping[str, FileRef], name: str, schema: TableSchema, columns: list[str]) -> pa.Table:
        table = read_table(self._run.files, files[name].path, schema, columns)
        if table.num_rows != files[name].rows:
            self._fault(name, f"{table.num_rows} rows, the manifest says {files[name].rows}.")
        return table

    def _links(self, files: Mapping[str, FileRef]) -> None:
        missing = [f"{name}.parquet" for name in _SMALL if f"{name}.parquet" not in files]
        if missing:
            self._fault("manifest.json", f"names no {', '.join(missing)}. Restore the manifest.")
            return
        try:
            trajectories: set[str] = set()
            parents: set[str] = set()
            rows = 0
            queries = set(self._table(files, "queries.parquet", QUERIES, ["query_id"]).column(0).to_pylist())
            for name in files:
                if name.startswith("trajectories/"):
                    table = self._table(files, name, TRAJECTORIES, ["trajectory_id", "parent_id", "query_id"])
                    rows += table.num_rows
                    trajectories.update(table.column("trajectory_id").to_pylist())
                    parents.update(one for one in table.column("parent_id").to_pylist() if one is not None)
                    strangers = set(table.column("query_id").to_pylist()) - queries
                    if strangers:
                        self._fault(name, f"query {min(strangers)!r} is not in queries.parquet.")
            if orphans := parents - trajectories:
                self._fault("trajectories", f"{len(orphans)} parents are no trajectory, the first {min(orphans)}.")
            if len(trajectories) != rows:
                self._fault("trajectories", f"{rows - len(trajectories)} trajectory ids come twice.")
            for table_name in ("rewards", "alignment", "advantages"):
                name = f"{table_name}.parquet"
                column = self._table(files, name, _SMALL[table_name], ["trajectory_id"]).column(0).to_pylist()
                strangers = {one for one in column if one is not None} - trajectories
                if strangers:
                    self._fault(name, f"{len(strangers)} rows name no trajectory, the first {min(strangers)}.")
                if table_name != "alignment" and (len(column) != rows or len(set(column)) != rows):
                    self._fault(name, f"{len(column)} rows for {rows} trajectories, expected one each.")
        except StoreError as error:
            self._fault("tables", f"{type(error).__name__}: {error}")

    def _policies(self, committed: CommittedManifest, parent: CommittedManifest | None) -> None:
        run = self._run
        for policy, step in committed.manifest.policies.items():
            where = f"policies/{policy}/{step.to_version}"
            before = parent.manifest.policies.get(policy) if parent else None
            if before is not None and before.to_version != step.from_version:
                self._fault(
                    where,
                    f"starts from version {step.from_version}, the iteration before ended at {before.to_version}.",
                )
            try:
                version = require_version(run.files, run.name, policy, step.folder, step.to_version)
            except TableIntegrityError as error:
                self._fault(where, str(error))
                continue
            if version.sha256 != step.sha256:
                self._fault(where, f"its record is {version.sha256[:12]}, the manifest says {step.sha256[:12]}.")
            if step.to_version != step.from_version:
                self._same_version(where, version)
                self._descent(where, policy, step, version)
            elif before is None:  # a policy that was never trained: nobody else reads its files here
                self._same_version(where, version)

    def _same_version(self, where: str, version: PolicyVersion) -> None:
        for fault in version_faults(self._run.files, version):
            self._fault(where, fault)
        self.files += len(version.files)
        self.bytes += sum(ref.bytes for ref in version.files.values())

    def _descent(self, where: str, policy: str, step: PolicyStep, version: PolicyVersion) -> None:
        """The version it was made from, and at the start of the chain that one's bytes."""
        try:
            source = require_version(self._run.files, self._run.name, policy, step.folder, step.from_version)
        except TableIntegrityError as error:
            self._fault(where, str(error))
            return
        if version.parent_sha256 != source.sha256:
            self._fault(
                where,
                f"was made from {(version.parent_sha256 or 'none')[:12]}, version {step.from_version} is "
                f"{source.sha256[:12]}. One of the two was replaced.",
            )
        if step.from_version == 0:
            self._same_version(f"policies/{policy}/0", source)
