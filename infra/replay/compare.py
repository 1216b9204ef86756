"""Two versions of a table, row by row: the same to the bit, close, or the first thing that is not."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.replay.verdicts import Difference, Outcome, StageVerdict

TOLERANCE = 1e-9
"""Of a number of a table, absolute and relative: float64 sums in another order, on another processor."""


def compare_tables(stage: str, stored: pa.Table, recomputed: pa.Table, *, kept: tuple[str, ...] = ()) -> StageVerdict:
    """Compare rows by their place in the table.

    Floats are compared by their bits, so that 0.0 and -0.0 differ; a row with a float that is close and nothing else
    that differs is close.
    """
    rows = min(stored.num_rows, recomputed.num_rows)
    unequal_N, far_N, largest = np.zeros(rows, bool), np.zeros(rows, bool), 0.0
    by_column: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in stored.column_names:
        unequal, far, gap = _compare(stored.column(name).slice(0, rows), recomputed.column(name).slice(0, rows))
        by_column[name] = unequal, far
        unequal_N |= unequal
        far_N |= far
        largest = max(largest, gap)
    longest = max(stored.num_rows, recomputed.num_rows)
    differing = int(far_N.sum()) + longest - rows
    first = None
    if far_N.any():
        row = int(far_N.argmax())
        first = _difference(stored, recomputed, row, next(name for name, (_, far) in by_column.items() if far[row]))
    elif longest > rows:
        first = _missing(stored, recomputed, rows)
    elif unequal_N.any():
        row = int(unequal_N.argmax())
        first = _difference(stored, recomputed, row, next(name for name, (bad, _) in by_column.items() if bad[row]))
    outcome = Outcome.DIFFERS if differing else Outcome.CLOSE if unequal_N.any() else Outcome.EQUAL
    tolerance = f"{TOLERANCE:g} absolute and relative"
    return StageVerdict(stage, outcome, longest, "rows", differing, tolerance, largest, first, kept)


def _compare(stored: pa.ChunkedArray, recomputed: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, float]:
    """Where two columns are unequal, where they are far apart, and the largest difference of numbers."""
    if pa.types.is_floating(stored.type):
        ours, theirs = (_floats(column) for column in (recomputed, stored))
        unequal = ours.view(np.int64) != theirs.view(np.int64)
        with np.errstate(invalid="ignore"):
            gap = np.abs(ours - theirs)
            far = unequal & ~(gap <= TOLERANCE + TOLERANCE * np.abs(theirs))  # a null on one side: NaN, so far
        numbers = gap[np.isfinite(gap)]
        return unequal, far, float(numbers.max(initial=0.0))
    equal = pc.fill_null(pc.equal(stored, recomputed), False)  # type: ignore[attr-defined]
    both_null = pc.and_(pc.is_null(stored), pc.is_null(recomputed))  # type: ignore[attr-defined]
    unequal = ~np.asarray(pc.or_(equal, both_null))  # type: ignore[attr-defined]
    return unequal, unequal, 0.0


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    """Float64 with one NaN for null; tables hold no other."""
    return np.asarray(pc.fill_null(column, float("nan")), dtype=np.float64)  # type: ignore[attr-defined]


def _difference(stored: pa.Table, recomputed: pa.Table, row: int, column: str) -> Difference:
    theirs, ours = _row(stored, row), _row(recomputed, row)
    return Difference(
        _text(theirs.get("agent")),
        _text(theirs.get("trajectory_id")),
        f"{_place(theirs)}column {column}",
        repr(theirs[column]),
        repr(ours[column]),
    )


def _missing(stored: pa.Table, recomputed: pa.Table, row: int) -> Difference:
    in_store = stored.num_rows > row
    there = _row(stored if in_store else recomputed, row)
    ours, theirs = ("none", "present") if in_store else ("present", "none")
    return Difference(_text(there.get("agent")), _text(there.get("trajectory_id")), f"{_place(there)}row", theirs, ours)


def _row(table: pa.Table, row: int) -> dict[str, object]:
    return table.slice(row, 1).to_pylist()[0]


def _place(row: dict[str, object]) -> str:
    """Which row, where its trajectory does not say so: a slot of a rollout."""
    if "slot" not in row:
        return ""
    return f"slot {row['slot']} of rollout {row['rollout_index']} of query {row['query_id']}, "


def _text(value: object) -> str | None:
    return None if value is None else str(value)
