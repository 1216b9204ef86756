"""Finished query groups, kept as they finish, so that a killed iteration loses only what was in flight."""

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import FILE_BYTES, TableWriter, read_table, table_writer, write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.errors import TableIntegrityError
from mgrpo_core.trajectories import Rollout, Trajectory

_log = logging.getLogger("mgrpo.store")
_GROUPS_AHEAD = 4
_READERS = 16  # requests in flight: an object store answers each in tens of milliseconds


def stage_group(files: StoreFiles, run: str, iteration: int, position: int, rollouts: Sequence[Rollout]) -> FileRef:
    """Keep a query's rollouts, all agents in one file, sorted by rollout and agent path. Staging again replaces it."""
    trajectories = sorted((one for rollout in rollouts for one in rollout.trajectories), key=_order)
    rows = [(position, one) for one in trajectories]
    path = layout.staged_group(run, iteration, position)
    return write_table(files, path, TRAJECTORIES, trajectories_table(rows))


def staged_groups(files: StoreFiles, run: str, iteration: int) -> dict[int, Mapping[str, int]]:
    """Positions of the queries whose groups are staged, each with the oldest version of every policy that sampled it.

    A file that cannot be read is not counted.
    """
    names = files.names(layout.staging_folder(run, iteration))
    positions = [int(stem) for stem in (name.removesuffix(".parquet") for name in names) if stem.isdecimal()]

    def oldest(position: int) -> Mapping[str, int] | None:
        try:
            group = _read_group(files, run, iteration, position, ["policy", "policy_version"])
        except TableIntegrityError:
            return None
        by_policy = group.group_by("policy").aggregate([("policy_version", "min")]).to_pylist()
        # null: no trajectory of the policy came to a turn
        return {row["policy"]: row["policy_version_min"] for row in by_policy if row["policy_version_min"] is not None}

    with ThreadPoolExecutor(_READERS) as readers:
        groups = zip(positions, readers.map(oldest, positions), strict=True)
        return {position: versions for position, versions in groups if versions is not None}


def materialize(
    files: StoreFiles, run: str, iteration: int, positions: Sequence[int], agents: Sequence[str]
) -> dict[str, list[FileRef]]:
    """Merge staged groups into one sorted table an agent, in shards; streamed, each token written once.

    The same groups give the same bytes. An agent without a trajectory gets a table of the whole schema and no rows.

    Raises:
        TableIntegrityError: a group is missing, names an unknown agent, or a trajectory comes twice.
    """
    seen: set[str] = set()
    with ExitStack() as stack:
        merged = {agent: stack.enter_context(_Shards(files, (run, iteration, agent))) for agent in agents}
        for position, group in _read_ahead(files, run, iteration, sorted(positions)):
            where = files.uri(layout.staged_group(run, iteration, position))
            ids = group.column("trajectory_id").to_pylist()
            twice = seen.intersection(ids) or {one for one, times in Counter(ids).items() if times > 1}
            if twice:
                raise TableIntegrityError(
                    f"{where}: trajectory {min(twice)} comes twice. Remove the file, and start again."
                )
            seen.update(ids)
            agent_of_row = np.array(group.column("agent").to_pylist(), dtype=object)
            there = sorted(set(agent_of_row))
            strangers = set(there) - set(agents)
            if strangers:
                raise TableIntegrityError(
                    f"{where}: has a trajectory of {min(strangers)!r}, which is no agent of this run "
                    f"({', '.join(agents)}). Remove the iteration's staging folder and start it again."
                )
            for agent in there:
                merged[agent].write(group.take(np.flatnonzero(agent_of_row == agent)))
    refs = {agent: shards.refs for agent, shards in merged.items()}
    _drop_others(files, layout.trajectories_folder(run, iteration), {ref.path for of in refs.values() for ref in of})
    return refs


def clear_staging(files: StoreFiles, run: str, iteration: int) -> None:
    """Remove what is staged of a committed iteration, which stands without that: a failure is a warning only."""
    folder = layout.staging_folder(run, iteration)
    try:
        files.remove_folder(folder)
    except Exception as error:
        _log.warning("%s: could not be removed (%s). The iteration is committed.", files.uri(folder), error)


def _order(one: Trajectory) -> tuple[int, tuple[tuple[int, str], ...]]:
    return one.key.rollout_index, one.key.call_order


def _read_group(
    files: StoreFiles, run: str, iteration: int, position: int, columns: Sequence[str] | None = None
) -> pa.Table:
    path = layout.staged_group(run, iteration, position)
    place = {"run": run, "iteration": iteration, "query_position": position}
    group = read_table(files, path, TRAJECTORIES, None if columns is None else [*columns, *place])
    for name, expected in place.items():
        found = set(group.column(name).unique().to_pylist()) - {expected}
        if found:
            raise TableIntegrityError(
                f"{files.uri(path)}: holds {name} {min(found)!r}, expected {expected!r}. The file was moved here; "
                "remove it, and start again."
            )
    return group


def _read_ahead(
    files: StoreFiles, run: str, iteration: int, positions: Sequence[int]
) -> Iterator[tuple[int, pa.Table]]:
    """Groups in order; from an object store the next few are under way meanwhile."""
    ahead = 1 if files.is_local else _GROUPS_AHEAD
    with ThreadPoolExecutor(ahead) as readers:
        waiting: deque[Future[pa.Table]] = deque()
        following = iter(positions)
        for position in positions:
            for coming in itertools.islice(following, ahead - len(waiting)):
                waiting.append(readers.submit(_read_group, files, run, iteration, coming))
            yield position, waiting.popleft().result()


def _drop_others(files: StoreFiles, folder: str, kept: set[str]) -> None:
    """Shards of an earlier attempt that was larger: no manifest names them, but a glob over the folder would."""
    for name in files.names(folder):
        if f"{folder}/{name}" not in kept:
            files.remove(f"{folder}/{name}")


class _Shards:
    """One agent's table while it is written: a file is closed when full, and the next begun."""

    def __init__(self, files: StoreFiles, place: tuple[str, int, str]) -> None:
        self._files = files
        self._place = place
        self._stack = ExitStack()
        self._writer: TableWriter
        self.refs: list[FileRef] = []

    def __enter__(self) -> "_Shards":
        self._open()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is None:
            self.refs.append(self._writer.ref)

    def write(self, rows: pa.Table) -> None:
        if self._writer.rows and self._writer.bytes + rows.nbytes > FILE_BYTES:
            self._stack.close()
            self.refs.append(self._writer.ref)
            self._open()
        self._writer.write(rows)

    def _open(self) -> None:
        path = layout.trajectories_file(*self._place, len(self.refs))
        self._writer = self._stack.enter_context(table_writer(self._files, path, TRAJECTORIES))
