"""Finished query groups, kept as they finish, so that a killed iteration loses only what was in flight."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import FILE_BYTES, TableWriter, read_table, table_writer, write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.errors import TableIntegrityError
from mgrpo_core.trajectories import Rollout


def stage_group(files: StoreFiles, run: str, iteration: int, position: int, rollouts: Sequence[Rollout]) -> FileRef:
    """Keep a query's rollouts, all agents in one file, sorted by rollout and agent path. Staging again replaces it."""
    rows = [(position, trajectory) for rollout in rollouts for trajectory in rollout.trajectories]
    path = layout.staged_group(run, iteration, position)
    return write_table(files, path, TRAJECTORIES, trajectories_table(rows))


def staged_positions(files: StoreFiles, run: str, iteration: int) -> set[int]:
    """Positions of the queries whose groups are staged; a file that cannot be read is not counted."""
    found = set()
    for name in files.names(layout.staging_folder(run, iteration)):
        position = int(name.removesuffix(".parquet"))
        try:
            read_table(files, layout.staged_group(run, iteration, position), TRAJECTORIES, ["trajectory_id"])
        except TableIntegrityError:
            continue
        found.add(position)
    return found


def materialize(
    files: StoreFiles, run: str, iteration: int, positions: Sequence[int], agents: Sequence[str]
) -> dict[str, list[FileRef]]:
    """Merge staged groups into one sorted table an agent, in shards; streamed, each token written once.

    The same groups give the same bytes. An agent without a trajectory gets a table of the whole schema and no rows.

    Raises:
        TableIntegrityError: a group is missing, names an unknown agent, or a trajectory comes twice.
    """
    seen: set[str] = set()
    with ExitStack() as open_files:
        merged = {agent: _Shards(open_files, files, (run, iteration, agent)) for agent in agents}
        for position in sorted(positions):
            path = layout.staged_group(run, iteration, position)
            group = read_table(files, path, TRAJECTORIES)
            ids = group.column("trajectory_id").to_pylist()
            twice = seen.intersection(ids)
            if twice or len(set(ids)) != len(ids):
                raise TableIntegrityError(
                    f"{files.uri(path)}: trajectory {min(twice or ids)} comes twice. Remove the file, and start again."
                )
            seen.update(ids)
            agent_of_row = np.array(group.column("agent").to_pylist(), dtype=object)
            strangers = set(agent_of_row) - set(agents)
            if strangers:
                raise TableIntegrityError(
                    f"{files.uri(path)}: has a trajectory of {min(strangers)!r}, which is no agent of this run "
                    f"({', '.join(agents)}). Remove the iteration's staging folder and start it again."
                )
            for agent in sorted(set(agent_of_row)):
                merged[agent].write(group.take(np.flatnonzero(agent_of_row == agent)))
    return {agent: shards.refs for agent, shards in merged.items()}


class _Shards:
    """One agent's table while it is written: a new file whenever one is full."""

    def __init__(self, open_files: ExitStack, files: StoreFiles, place: tuple[str, int, str]) -> None:
        self._open_files = open_files
        self._files = files
        self._place = place
        self._writers: list[TableWriter] = []
        self._writers.append(self._next())

    def write(self, rows: pa.Table) -> None:
        if self._writers[-1].bytes >= FILE_BYTES:
            self._writers.append(self._next())
        self._writers[-1].write(rows)

    @property
    def refs(self) -> list[FileRef]:
        """Of all shards, once their files are closed."""
        return [writer.ref for writer in self._writers]

    def _next(self) -> TableWriter:
        path = layout.trajectories_file(*self._place, len(self._writers))
        return self._open_files.enter_context(table_writer(self._files, path, TRAJECTORIES))
