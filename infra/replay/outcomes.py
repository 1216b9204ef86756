"""Outcomes of an iteration a few queries at a time: memory holds those, and one row group an agent."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from infra.store.files import StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import stream_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of
from mgrpo_core.trajectories import Trajectory

QUERIES_AT_ONCE = 64


def outcomes_by_queries(
    files: StoreFiles, shards: Mapping[str, Sequence[str]], queries: int, *, with_messages: Mapping[str, bool]
) -> Iterator[dict[str, list[Trajectory]]]:
    """Trajectories without tokens of `QUERIES_AT_ONCE` queries after the other, by agent.

    Tables are sorted by the query's position; a row that is out of its order is met with another query's.

    Args:
        files: the store.
        shards: paths of each agent's table.
        queries: of the iteration.
        with_messages: by agent, whether what was said is wanted: only a judge looks at it, and it is nearly all text.
    """
    cursors = {agent: _Cursor(files, paths, messages=with_messages[agent]) for agent, paths in shards.items()}
    for start in range(0, queries, QUERIES_AT_ONCE):
        last = start + QUERIES_AT_ONCE >= queries
        yield {
            agent: trajectories_of(cursor.below(None if last else start + QUERIES_AT_ONCE))
            for agent, cursor in cursors.items()
        }


class _Cursor:
    """One agent's rows, front to back."""

    def __init__(self, files: StoreFiles, paths: Sequence[str], *, messages: bool) -> None:
        columns = [name for name in OUTCOME_COLUMNS if messages or name != "messages"]
        self._groups = (group for path in paths for group in stream_table(files, path, TRAJECTORIES, columns))
        self._waiting = pa.Table.from_batches(
            [], pa.schema([field for field in TRAJECTORIES.columns if field.name in columns])
        )
        self._messages = messages

    def below(self, position: int | None) -> pa.Table:
        """The next rows, up to the first at this position or a later one; None = all that are left."""
        parts: list[pa.Table] = []
        while True:
            positions = self._waiting.column("query_position").to_numpy()
            beyond = np.flatnonzero(positions >= position) if position is not None else np.zeros(0, int)
            count = int(beyond[0]) if beyond.size else len(positions)
            parts.append(self._waiting.slice(0, count))
            self._waiting = self._waiting.slice(count)
            if beyond.size or (group := next(self._groups, None)) is None:
                break
            self._waiting = group
        rows = pa.concat_tables(parts)
        return rows if self._messages else rows.append_column(*_no_messages(rows.num_rows))


def _no_messages(rows: int) -> tuple[pa.Field, pa.Array]:
    field = TRAJECTORIES.columns.field("messages")
    return field, pa.array([[]] * rows, type=field.type)
