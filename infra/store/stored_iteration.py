"""A committed iteration as its readers have it: manifest, config, and where its tables are. Nothing is ever written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from infra.store import layout
from infra.store.export_record import named_iterations, read_partial
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import Manifest, is_committed, newest_committed, read_manifest
from infra.store.runs import StoredRun, read_config
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TableSchema
from infra.store.tables import read_table
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError, TableIntegrityError
from mgrpo_core.trajectories import Query

_SMALL: Mapping[str, TableSchema] = {
    "queries": QUERIES,
    "rewards": REWARDS,
    "alignment": ALIGNMENT,
    "advantages": ADVANTAGES,
}


@dataclass(frozen=True, slots=True)
class StoredIteration:
    """An iteration whose manifest and config could be read."""

    files: StoreFiles
    manifest: Manifest
    config: RunConfig

    @property
    def place(self) -> tuple[str, int]:
        """Run and iteration."""
        return self.manifest.run, self.manifest.iteration

    def ref(self, name: str) -> FileRef:
        """A file of the manifest, by its name below the iteration's folder.

        Raises: TableIntegrityError if it names none.
        """
        if name not in self.manifest.files:
            path = self.files.uri(layout.manifest_file(*self.place))
            raise TableIntegrityError(f"{path}: names no {name}. Restore the manifest.")
        return self.manifest.files[name]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """One of the small tables: queries, rewards, alignment, advantages."""
        return read_table(self.files, self.ref(f"{name}.parquet").path, _SMALL[name], columns)

    def queries(self) -> list[Query]:
        """The iteration's queries with their reference answers, in order."""
        rows = self.table("queries", ["query_id", "question", "answers", "metadata_json"]).to_pylist()
        return [Query(row["query_id"], row["question"], tuple(row["answers"]), row["metadata_json"]) for row in rows]

    def shards(self, agent: str) -> tuple[FileRef, ...]:
        """An agent's trajectory table."""
        found: list[FileRef] = []
        prefix = f"{layout.iteration_folder(*self.place)}/"
        while (name := _shard(prefix, self.place, agent, len(found))) in self.manifest.files:
            found.append(self.manifest.files[name])
        return tuple(found)

    def all_shards(self) -> dict[str, tuple[FileRef, ...]]:
        """The same of every agent."""
        return {agent: self.shards(agent) for agent in self.config.agents}


def open_stored(run: StoredRun, iteration: int) -> StoredIteration:
    """An iteration for reading.

    Raises:
        ConfigError: it is not committed.
        TableIntegrityError: its manifest or config is damaged.
    """
    require_committed(run, iteration)
    manifest = read_manifest(run.files, run.name, iteration).manifest
    return StoredIteration(run.files, manifest, read_config(run, manifest.config_sha256))


def require_committed(run: StoredRun, iteration: int) -> None:
    """Raises: ConfigError if the iteration is not committed."""
    if not is_committed(run.files, run.name, iteration):
        found = committed_iterations(run)
        if isinstance(found, range):
            there = f"0 to {len(found) - 1}" if found else "none yet"
        else:
            there = named_iterations(found)
        raise ConfigError(f"iteration {iteration} of run {run.name!r} is not committed. Committed: {there}.")


def committed_iterations(run: StoredRun) -> Sequence[int]:
    """The iterations that there are, ascending; of a run that is here in part, those that it is."""
    partial = read_partial(run.files, run.name)
    return partial.iterations if partial else range(newest_committed(run.files, run.name) + 1)


def _shard(prefix: str, place: tuple[str, int], agent: str, number: int) -> str:
    return layout.trajectories_file(*place, agent, number).removeprefix(prefix)
