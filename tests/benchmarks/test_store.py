"""The trajectories table against plain pyarrow with the same options: at least half its speed, hashes and all."""

import os
import time
from collections.abc import Callable
from pathlib import Path

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


def fastest(function: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the fastest of several calls: others share the cores."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def write_plainly(table: pa.Table, path: Path) -> None:
    """What pyarrow alone does; durable, as the store's files are."""
    with path.open("wb") as file:
        pq.write_table(table, file, row_group_size=ROWS, **_PLAIN)
        file.flush()
        os.fsync(file.fileno())


def test_writing_a_table(benchmark, files, table, tmp_path):
    plain = fastest(lambda: write_plainly(table, tmp_path / "plain.parquet"))
    benchmark.pedantic(lambda: write_table(files, PATH, TRAJECTORIES, table), rounds=5)
    benchmark.extra_info["share_of_plain_pyarrow"] = plain / benchmark.stats.stats.min
    assert benchmark.stats.stats.min <= 2 * plain


def test_reading_a_table(benchmark, files, table):
    write_table(files, PATH, TRAJECTORIES, table)
    plain = fastest(lambda: pq.ParquetFile(files.full(PATH), page_checksum_verification=True).read())
    benchmark.pedantic(lambda: read_table(files, PATH, TRAJECTORIES), rounds=5)
    benchmark.extra_info["share_of_plain_pyarrow"] = plain / benchmark.stats.stats.min
    assert benchmark.stats.stats.min <= 2 * plain


def test_reading_what_an_update_reads(benchmark, files, table):
    """Token columns, a row group at a time: the stream of a policy update."""
    write_table(files, PATH, TRAJECTORIES, table)
    columns = ["trajectory_id", *TOKEN_COLUMNS, "segment_starts", "temperature"]
    plain = fastest(lambda: pq.ParquetFile(files.full(PATH), page_checksum_verification=True).read(columns=columns))
    benchmark.pedantic(lambda: list(stream_table(files, PATH, TRAJECTORIES, columns)), rounds=5)
    assert benchmark.stats.stats.min <= 2 * plain


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
