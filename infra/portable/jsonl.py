"""Trajectories as plain text: JSON Lines, one object a trajectory, for people and programs that want no Parquet."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.portable.places import folder_and_name, require_free
from infra.store.files import FileRef
from infra.store.runs import open_store, require_run
from infra.store.schemas import TOKEN_COLUMNS, TRAJECTORIES
from infra.store.stored_iteration import StoredIteration, committed_iterations, open_stored
from infra.store.tables import stream_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS
from mgrpo_core.errors import TableIntegrityError

_ROWS_AT_ONCE = 256
_PARTS = ("format", "correct", "main_correct", "expert")
_TURN = ("action", "action_name", "arguments_json", "error", "finish_reason", "observation_cut")
_PLAIN = (
    "run", "iteration", "trajectory_id", "parent_id", "query_id", "rollout_index", "agent", "agent_path", "policy",
    "policy_version", "status", "stop_reason", "failure", "task", "reply", "messages",
)  # fmt: skip


def export_jsonl(
    store: str, run: str, target: str, *, iterations: Sequence[int] | None = None, tokens: bool = False
) -> int:
    """Write a line for each trajectory of some iterations; return how many.

    A row group of trajectories is in memory at a time, beside the iteration's small tables. The file appears when it is
    whole. Numbers that are no numbers are null: every line is valid JSON.

    Args:
        store: its URL.
        run: name of the run.
        target: a path or fsspec URL.
        iterations: which; None = all.
        tokens: with token ids, loss mask and log-probs.

    Raises:
        ConfigError: an iteration is not committed, or the target is there already.
        TableIntegrityError: a table is damaged.
    """
    found = require_run(open_store(store), run)
    chosen = sorted(set(iterations)) if iterations else committed_iterations(found)
    opened = [open_stored(found, one) for one in chosen]
    files, name = folder_and_name(target)
    require_free(files, name)
    lines = 0
    with files.writing(name) as file:
        for stored in opened:
            for line in _lines(stored, tokens=tokens):
                file.write(line)
                lines += 1
    return lines


def _lines(stored: StoredIteration, *, tokens: bool) -> Iterator[bytes]:
    queries = {query.query_id: query for query in stored.queries()}
    rewards = _Joined(stored, "rewards")
    advantages = _Joined(stored, "advantages")
    columns = (*OUTCOME_COLUMNS, *(TOKEN_COLUMNS if tokens else ()))
    for refs in stored.all_shards().values():
        for part in _parts(stored, refs, columns):
            ids = part.column("trajectory_id")
            rows = zip(part.to_pylist(), rewards.of(ids), advantages.of(ids), strict=True)
            for row, reward, advantage in rows:
                query = queries.get(row["query_id"])
                asked = {"question": query.question, "answers": query.answers} if query else {}
                yield _line(row, asked, reward, advantage, tokens=tokens)


def _parts(stored: StoredIteration, refs: Sequence[FileRef], columns: Sequence[str]) -> Iterator[pa.Table]:
    for ref in refs:
        for group in stream_table(stored.files, ref.path, TRAJECTORIES, columns):
            for start in range(0, group.num_rows, _ROWS_AT_ONCE):
                yield group.slice(start, _ROWS_AT_ONCE)


def _line(
    row: Mapping[str, Any],
    asked: Mapping[str, Any],
    reward: Mapping[str, Any],
    advantage: Mapping[str, Any],
    *,
    tokens: bool,
) -> bytes:
    found = {name: row[name] for name in _PLAIN} | dict(asked)
    found["turns"] = [{name: turn[name] for name in _TURN} for turn in row["turns"]]
    found["reward"] = {
        "total": reward["reward"],
        "status": reward["status"],
        "reason": reward["reason"],
        **{part: {"value": reward[part], "weight": reward[f"{part}_weight"]} for part in _PARTS},
    }
    found["advantage"] = {
        "value": advantage["advantage"],
        "weight": advantage["weight"],
        "included": advantage["included"],
        "excluded_reason": advantage["excluded_reason"],
        "group_mean": advantage["group_mean"],
        "group_std": advantage["group_std"],
    }
    if tokens:
        found |= {name: row[name] for name in TOKEN_COLUMNS}
        found["logprobs"] = [_finite(one) for one in row["logprobs"]]
    return (json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class _Joined:
    """Rows of a small table by their trajectory."""

    def __init__(self, stored: StoredIteration, table: str) -> None:
        self._rows = stored.table(table)
        self._where = stored.files.uri(stored.ref(f"{table}.parquet").path)

    def of(self, ids: pa.ChunkedArray) -> list[dict[str, Any]]:
        """In the order of the ids. Raises: TableIntegrityError if one has no row."""
        places = pc.index_in(ids, value_set=self._rows.column("trajectory_id"))  # type: ignore[attr-defined]
        if places.null_count:
            raise TableIntegrityError(
                f"{self._where}: has no row for {places.null_count} trajectories. Run `mgrpo verify`."
            )
        return self._rows.take(places).to_pylist()
