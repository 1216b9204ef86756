"""Is a run whole? Every file, row and link against the manifests; every fault named, and what is still usable."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from infra.store import layout
from infra.store.export_record import ExportRecord, read_partial
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import CommittedManifest, Manifest, PolicyStep, newest_committed, read_manifest
from infra.store.policies import PolicyVersion, require_version, version_faults
from infra.store.runs import StoredRun, read_config
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import read_table
from mgrpo_core.errors import StoreError, TableIntegrityError

_SMALL = {"queries": QUERIES, "rewards": REWARDS, "alignment": ALIGNMENT, "advantages": ADVANTAGES}


_READERS = 4
"""Two cores hash two files; the others wait for object storage."""
_NO_IDS = pa.chunked_array([], pa.string())


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
        not_included: of a run that is here in part, what was left out and could not be checked, in words.
    """

    run: str
    iterations: int
    files: int
    bytes: int
    faults: tuple[Fault, ...]
    usable_through: int
    not_included: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.faults


def verify_run(run: StoredRun) -> Verification:
    """Check hashes, sizes, row counts, schemas, the chain of manifests, links between tables, and policy versions.

    Raises: SchemaVersionError, StoreError: the run is of a newer mgrpo, or there is none.
    """
    partial = read_partial(run.files, run.name)
    checked = _Checked()
    if partial is None:
        numbers: Sequence[int] = range(newest_committed(run.files, run.name) + 1)
        faults = list(_orphans(run, len(numbers) - 1))
    else:
        numbers, faults = partial.iterations, []
    parent: CommittedManifest | None = None
    with ThreadPoolExecutor(_READERS, "mgrpo-verify") as pool:
        hashes = _Hashes(run.files, pool)
        for iteration in numbers:
            if parent is not None and parent.manifest.iteration != iteration - 1:
                parent = None
            found = _Iteration(run, iteration, hashes, checked, policies=partial is None or partial.policies)
            parent = found.check(parent)
            faults.extend(found.faults)
        if partial is not None:
            faults.extend(_beside_the_iterations(partial, hashes, checked))
    first_broken = min((fault.iteration for fault in faults), default=None)
    usable = max((one for one in numbers if first_broken is None or one < first_broken), default=-1)
    left_out = partial.left_out() if partial else ()
    return Verification(run.name, len(numbers), checked.files, checked.bytes, tuple(faults), usable, left_out)


@dataclass(slots=True)
class _Checked:
    """Files whose bytes were read."""

    paths: set[str] = field(default_factory=set)
    files: int = 0
    bytes: int = 0

    def add(self, ref: FileRef, size: int) -> None:
        self.paths.add(ref.path)
        self.files += 1
        self.bytes += size


class _Hashes:
    """Hashes of files, several at a time: hashing holds no lock of Python's, and S3 answers side by side."""

    def __init__(self, files: StoreFiles, pool: ThreadPoolExecutor) -> None:
        self._files = files
        self._pool = pool
        self._begun: dict[str, Future[tuple[str, int]]] = {}

    def begin(self, path: str) -> None:
        """Have it hashed; `of` waits for it."""
        if path not in self._begun:
            self._begun[path] = self._pool.submit(self._files.sha256, path)

    def of(self, path: str) -> tuple[str, int]:
        """Hash and size. Raises: TableIntegrityError if there is no such file."""
        self.begin(path)
        return self._begun.pop(path).result()


def _beside_the_iterations(partial: ExportRecord, hashes: "_Hashes", checked: _Checked) -> Iterator[Fault]:
    """What an export has besides: versions that an iteration starts from, configs, evaluations."""
    for name, ref in partial.files.items():
        if ref.path in checked.paths:
            continue
        try:
            sha256, size = hashes.of(ref.path)
        except TableIntegrityError as error:
            yield Fault(partial.iterations[0], name, str(error))
            continue
        checked.add(ref, size)
        if (sha256, size) != (ref.sha256, ref.bytes):
            yield Fault(partial.iterations[0], name, "changed after it was exported. Import or export it again.")


def _orphans(run: StoredRun, newest: int) -> Iterable[Fault]:
    """Manifests behind a gap: an iteration that is missing hides all after it."""
    for name in run.files.names(layout.iterations_folder(run.name)):
        if name.isdigit() and int(name) > newest + 1 and run.files.holds(layout.manifest_file(run.name, int(name))):
            yield Fault(
                newest + 1, name, f"iteration {newest + 1} is missing, although {int(name)} is committed. Restore it."
            )


class _Iteration:
    """The check of one iteration."""

    def __init__(
        self, run: StoredRun, iteration: int, hashes: "_Hashes", checked: "_Checked", *, policies: bool
    ) -> None:
        self._run = run
        self._iteration = iteration
        self._hashes = hashes
        self._checked = checked
        self._with_policies = policies
        self.faults: list[Fault] = []

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
        for ref in manifest.files.values():
            self._hashes.begin(ref.path)
        if self._with_policies:  # weights are hashed while the tables are read
            self._begin_versions(manifest)
        whole = [self._same_bytes(name, ref) for name, ref in manifest.files.items()]
        self._strangers(manifest)
        if all(whole):
            self._links(manifest.files)
        if self._with_policies:
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
            sha256, size = self._hashes.of(ref.path)
        except TableIntegrityError as error:
            self._fault(name, str(error))
            return False
        self._checked.add(ref, size)
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
            queries = self._table(files, "queries.parquet", QUERIES, ["query_id"]).column(0)
            ids, parents = [_NO_IDS], [_NO_IDS]
            for name in files:
                if name.startswith("trajectories/"):
                    table = self._table(files, name, TRAJECTORIES, ["trajectory_id", "parent_id", "query_id"])
                    ids.append(table.column("trajectory_id"))
                    parents.append(table.column("parent_id"))
                    strangers = _missing(table.column("query_id"), queries)
                    if strangers:
                        self._fault(name, f"query {min(strangers)!r} is not in queries.parquet.")
            trajectories, parent_ids = (
                pa.chunked_array([c for one in part for c in one.chunks], pa.string()) for part in (ids, parents)
            )
            rows = len(trajectories)
            if orphans := _missing(parent_ids, trajectories):
                self._fault("trajectories", f"{len(orphans)} parents are no trajectory, the first {min(orphans)}.")
            if repeated := rows - _distinct(trajectories):
                self._fault("trajectories", f"{repeated} trajectory ids come twice.")
            for table_name in ("rewards", "alignment", "advantages"):
                name = f"{table_name}.parquet"
                column = self._table(files, name, _SMALL[table_name], ["trajectory_id"]).column(0)
                place_N = pc.index_in(column, value_set=trajectories)  # type: ignore[attr-defined]
                strangers = column.filter(place_N.is_null()).drop_null().unique().to_pylist()
                if strangers:
                    self._fault(name, f"{len(strangers)} rows name no trajectory, the first {min(strangers)}.")
                distinct = len(place_N.drop_null().unique()) + len(strangers)
                if table_name != "alignment" and (len(column) != rows or distinct != rows):
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

    def _begin_versions(self, manifest: Manifest) -> None:
        for policy, step in manifest.policies.items():
            with contextlib.suppress(TableIntegrityError):  # told of where the version is checked
                if step.to_version == step.from_version:
                    continue
                version = require_version(self._run.files, self._run.name, policy, step.folder, step.to_version)
                for ref in version.files.values():
                    self._hashes.begin(ref.path)

    def _same_version(self, where: str, version: PolicyVersion) -> None:
        for ref in version.files.values():
            self._hashes.begin(ref.path)
        for fault in version_faults(self._run.files, version, self._hashes.of):
            self._fault(where, fault)
        for ref in version.files.values():
            self._checked.add(ref, ref.bytes)

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


def _missing(column: pa.ChunkedArray, there: pa.ChunkedArray) -> list[str]:
    """Values of a column that another one has not, each once; null is no value."""
    known = pc.is_in(column, value_set=there)  # type: ignore[attr-defined]
    return column.filter(pc.invert(known)).drop_null().unique().to_pylist()  # type: ignore[attr-defined]


def _distinct(column: pa.ChunkedArray) -> int:
    """How many values differ; null counts as one, as in a set."""
    return pc.count_distinct(column, mode="all").as_py()  # type: ignore[attr-defined]
