"""What the pages read of a run, kept once read: an iteration that is committed does not change."""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.store.manifests import is_committed, newest_committed
from infra.store.runs import StoredRun
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.traces.filters import TraceFilter, select
from infra.traces.index import trajectory_index
from infra.traces.rollout import RolloutTrace, read_rollout
from infra.traces.token_text import TokenTexts
from infra.tracking.history import RunHistory
from mgrpo_core.trajectories import Query

Direction = Literal["asc", "desc"]
Sorting = tuple[tuple[str, Direction], ...]

_INDEXES, _SELECTIONS, _ROLLOUTS = 4, 64, 16
_compute: Any = pc
_Value = TypeVar("_Value")


class _Kept:
    """The most recent values of a function; each made once, however many requests ask at the same moment."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        with self._lock:
            found = self._values.get(key)
            value = self._values[key] = found or Future()
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        if found is None:
            try:
                value.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._values.pop(key, None)  # asked again, it is tried again
                value.set_exception(error)
        return value.result()


class RunReader:
    """A run for reading, by many requests at once."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self._history = RunHistory(run.files, run.name)
        self._count = newest_committed(run.files, run.name) + 1
        self._queries, self._indexes = _Kept(_INDEXES), _Kept(_INDEXES)
        self._selections, self._sorted = _Kept(_SELECTIONS), _Kept(_SELECTIONS)
        self._rollouts = _Kept(_ROLLOUTS)
        self.token_texts = TokenTexts(run)

    def iterations(self) -> int:
        """Committed iterations, now."""
        if not is_committed(self.run.files, self.run.name, self._count - 1):
            self._count = newest_committed(self.run.files, self.run.name) + 1  # one was set aside
        while is_committed(self.run.files, self.run.name, self._count):
            self._count += 1
        return self._count

    def figures(self) -> tuple[list[dict[str, float]], list[str]]:
        """A row of numbers an iteration, of those that can be read, and what is wrong with the others."""
        rows, faults = self._history.sound_rows(self.iterations())
        return [{name: value for name, value in row.items() if _finite(value)} for row in rows], faults

    def metrics(self, iteration: int) -> dict[str, float]:
        """Of one iteration."""
        return {name: value for name, value in self._history.metrics(iteration).items() if _finite(value)}

    def stored(self, iteration: int) -> StoredIteration:
        """The iteration as it stands in the store now."""
        return open_stored(self.run, iteration)

    def queries(self, stored: StoredIteration) -> list[Query]:
        """The iteration's queries by position."""
        return self._queries.get(_key(stored), stored.queries)

    def index(self, stored: StoredIteration) -> pa.Table:
        """One row a trajectory; see `trajectory_index`."""
        return self._indexes.get(_key(stored), lambda: trajectory_index(stored).combine_chunks())

    def selected(self, stored: StoredIteration, wanted: TraceFilter, sorting: Sorting = ()) -> np.ndarray:
        """Rows of the index that are wanted, sorted; what has no value comes last."""
        key = _key(stored)

        def chosen() -> np.ndarray:
            index = self.index(stored)
            numbered = index.append_column("row", pa.array(np.arange(index.num_rows, dtype=np.int32)))
            return select(stored, numbered, wanted).column("row").to_numpy()

        rows_N = self._selections.get((key, wanted), chosen)

        def in_order() -> np.ndarray:
            keys = [(name, "ascending" if way == "asc" else "descending") for name, way in sorting]
            order_N = _compute.sort_indices(self.index(stored).take(rows_N), sort_keys=keys)
            return rows_N[order_N.to_numpy()]

        return self._sorted.get((key, wanted, sorting), in_order) if sorting else rows_N

    def group(self, stored: StoredIteration, position: int) -> pa.Table:
        """The main agent's trajectories of a query, by rollout."""
        index = self.index(stored)
        main = _compute.and_(_compute.equal(index["query_position"], position), _compute.equal(index["depth"], 0))
        return index.filter(main)

    def rollout(self, stored: StoredIteration, position: int, rollout_index: int, *, tokens: bool) -> RolloutTrace:
        """A rollout by its query's position.

        Raises: StoreError if there is none.
        """
        queries = self.queries(stored)
        query_id = queries[position].query_id if position < len(queries) else f"at position {position}"
        key = (_key(stored), position, rollout_index, tokens)
        return self._rollouts.get(key, lambda: read_rollout(stored, query_id, rollout_index, tokens=tokens))


def _key(stored: StoredIteration) -> str:
    """Another one where the iteration was set aside and computed again."""
    return hashlib.sha256(stored.manifest.to_bytes()).hexdigest()


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
