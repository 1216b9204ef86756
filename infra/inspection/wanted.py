"""Agents by name or by path, on top of the filters of traces."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.store.stored_iteration import StoredIteration
from infra.traces.filters import TraceFilter, select

_compute: Any = pc


def matching(stored: StoredIteration, index: pa.Table, wanted: TraceFilter, path: str | None) -> pa.Table:
    """`select`, and of it the trajectories at an agent path, such as `main/0:searcher`; None = at any."""
    if path is not None:
        index = index.filter(_compute.equal(index["agent_path"], path))
    return select(stored, index, wanted)
