"""The trajectories table against plain pyarrow with the same options: at least half its speed, hashes and all."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.schemas import TOKEN_COLUMNS, TRAJECTORIES
from infra.store.tables import read_table, stream_table, write_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of, trajectories_table
from mgrpo_core.seeds import rng_of
from mgrpo_core.trajectories import Message, PathStep, Status, StopReason, Trajectory, TrajectoryKey, Turn

ROWS, TOKENS, TURNS = 4_000, 1_000, 4
_PLAIN = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}


def trajectory(row: int) -> Trajectory:
    """1,000 tokens in four turns, token ids spread over a vocabulary of 150,000."""
    rng = rng_of("benchmark", row)
    main = TrajectoryKey("bench", 3, f"q{row // 64}", row % 8, (PathStep("main", 0),))
    mask_T = np.arange(TOKENS) % (TOKENS // TURNS) >= 100
    span = TOKENS // TURNS
    turns = [Turn(s + 100, s + span, "stop", 3, int(rng.integers(2**62)), "tool", "search", '{"query": "x"}')
             for s in range(0, TOKENS, span)]  # fmt: skip
    return Trajectory(
        key=main.child("searcher", row // 8 % 8),
        policy="sub",
        token_ids=rng.integers(0, 150_000, TOKENS, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, -rng.exponential(size=TOKENS), np.nan).astype(np.float32),
        segment_starts=(0,),
        turns=tuple(turns),
        messages=tuple(Message("assistant", f"{row} " + "word " * 180) for _ in range(TURNS)),
        task="Which river flows through it?",
        reply="The Loire.",
        temperature=1.0,
        status=Status.OK,
        stop_reason=StopReason.ANSWER,
    )


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return [trajectory(row) for row in range(ROWS)]


@pytest.fixture(scope="module")
def table(trajectories: list[Trajectory]) -> pa.Table:
    return trajectories_table(list(enumerate(trajectories)))


@pytest.fixture
def files(tmp_path: Path) -> StoreFiles:
    return StoreFiles(str(tmp_path / "store"))


PATH = layout.trajectories_file("bench", 3, "searcher", 0)


def share_of_plain(benchmark: Any, ours: Callable[[], object], plain: Callable[[], object]) -> float:
    """Speed of `ours` as a share of `plain`, the fastest of seven calls each; in turns, for others share the cores."""
    seconds: list[float] = []

    def call_plain() -> None:
        began = time.perf_counter()
        plain()
        seconds.append(time.perf_counter() - began)

    benchmark.pedantic(ours, setup=call_plain, rounds=7)
    benchmark.extra_info["share_of_plain_pyarrow"] = share = min(seconds) / benchmark.stats.stats.min
    return share


def write_plainly(table: pa.Table, path: Path) -> None:
    """What pyarrow alone does; durable, as the store's files are."""
    with path.open("wb") as file:
        pq.write_table(table, file, row_group_size=ROWS, **_PLAIN)
        file.flush()
        os.fsync(file.fileno())


def test_writing_a_table(benchmark, files, table, tmp_path):
    plain = tmp_path / "plain.parquet"
    share = share_of_plain(
        benchmark, lambda: write_table(files, PATH, TRAJECTORIES, table), lambda: write_plainly(table, plain)
    )
    assert share >= 0.5


def read_plainly(path: str, columns: list[str] | None = None) -> pa.Table:
    return pq.ParquetFile(path, page_checksum_verification=True).read(columns=columns)


def test_reading_a_table(benchmark, files, table):
    write_table(files, PATH, TRAJECTORIES, table)
    path = files.full(PATH)
    assert share_of_plain(benchmark, lambda: read_table(files, PATH, TRAJECTORIES), lambda: read_plainly(path)) >= 0.5


def test_reading_what_an_update_reads(benchmark, files, table):
    """Token columns, a row group at a time: the stream of a policy update."""
    write_table(files, PATH, TRAJECTORIES, table)
    path, columns = files.full(PATH), ["trajectory_id", *TOKEN_COLUMNS, "segment_starts", "temperature"]
    share = share_of_plain(
        benchmark,
        lambda: list(stream_table(files, PATH, TRAJECTORIES, columns)),
        lambda: read_plainly(path, columns),
    )
    assert share >= 0.5


def test_trajectories_become_a_table(benchmark, trajectories):
    rows = list(enumerate(trajectories))
    table = benchmark.pedantic(lambda: trajectories_table(rows), rounds=3)
    benchmark.extra_info["rows_per_s"] = ROWS / benchmark.stats.stats.min
    assert table.num_rows == ROWS


def test_a_table_becomes_trajectories(benchmark, table):
    found = benchmark.pedantic(lambda: trajectories_of(table), rounds=3)
    benchmark.extra_info["rows_per_s"] = ROWS / benchmark.stats.stats.min
    assert len(found) == ROWS


def test_a_table_without_tokens_becomes_trajectories(benchmark, files, table):
    """What rewards read."""
    write_table(files, PATH, TRAJECTORIES, table)
    found = benchmark.pedantic(
        lambda: trajectories_of(read_table(files, PATH, TRAJECTORIES, OUTCOME_COLUMNS)), rounds=3
    )
    benchmark.extra_info["rows_per_s"] = ROWS / benchmark.stats.stats.min
    assert len(found) == ROWS
