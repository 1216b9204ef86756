"""The commit of an iteration of 1,024 trajectories on a real S3 server: at most 2 s, what stages compute left out.

Beside it the same on a local disk, and a plain upload of the same bytes.
"""

import itertools
import os
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import Manifest, commit_manifest
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TableSchema
from infra.store.staging import clear_staging, materialize, stage_group
from infra.store.tables import write_table
from infra.store.writer import new_writer
from mgrpo_core.data_order import DataCursor
from mgrpo_core.seeds import rng_of
from mgrpo_core.trajectories import Message, PathStep, Rollout, Status, StopReason, Trajectory, TrajectoryKey, Turn
from tests.servers.s3_proxy import s3_proxy
from tests.servers.seaweedfs import seaweedfs_endpoint

__all__ = ["seaweedfs_endpoint"]

QUERY_COUNT, ROLLOUTS, DELEGATIONS, TOKENS = 16, 8, 7, 1_000
ROUNDS, MOST_S, MOST_REQUESTS = 5, 2.0, 36


def trajectory(key: TrajectoryKey) -> Trajectory:
    """1,000 tokens in one turn and 1,000 words of text."""
    rng = rng_of("benchmark", key.trajectory_id)
    mask_T = np.arange(TOKENS) >= 100
    return Trajectory(
        key=key,
        policy="main" if key.agent == "main" else "sub",
        token_ids=rng.integers(0, 150_000, TOKENS, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, -rng.exponential(size=TOKENS), np.nan).astype(np.float32),
        segment_starts=(0,),
        turns=(Turn(100, TOKENS, "stop", 0, int(rng.integers(2**62)), "answer"),),
        messages=(Message("assistant", f"{key.trajectory_id} " + "word " * 700),),
        task="Which river flows through it?",
        reply="The Loire.",
        temperature=1.0,
        status=Status.OK,
        stop_reason=StopReason.ANSWER,
    )


def group(run: str, query: int) -> list[Rollout]:
    rollouts = []
    for index in range(ROLLOUTS):
        main = TrajectoryKey(run, 0, f"q{query}", index, (PathStep("main", 0),))
        keys = [main, *(main.child("searcher", call) for call in range(DELEGATIONS))]
        rollouts.append(Rollout(f"q{query}", index, tuple(trajectory(key) for key in keys)))
    return rollouts


def table_of_rows(schema: TableSchema, rows: int) -> pa.Table:
    """Any rows of a schema; what is in them costs little."""
    arrays = []
    for field in schema.columns:
        if pa.types.is_list(field.type):
            arrays.append(pa.array([["x"]] * rows, field.type))
        elif pa.types.is_string(field.type):
            arrays.append(pa.array([f"{number:032x}" for number in range(rows)], field.type))
        else:
            arrays.append(pa.array([0] * rows).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema.arrow)


ROWS = QUERY_COUNT * ROLLOUTS * (1 + DELEGATIONS)
SMALL = {
    "queries": (QUERIES, table_of_rows(QUERIES, QUERY_COUNT)),
    "rewards": (REWARDS, table_of_rows(REWARDS, ROWS)),
    "alignment": (ALIGNMENT, table_of_rows(ALIGNMENT, ROWS)),
    "advantages": (ADVANTAGES, table_of_rows(ADVANTAGES, ROWS)),
}


def commit(files: StoreFiles, run: str) -> None:
    """What the stages write between the last rollout and the next iteration."""
    refs: list[FileRef] = []
    for shards in materialize(files, run, 0, range(QUERY_COUNT), ("main", "searcher")).values():
        refs.extend(shards)
    refs.extend(write_table(files, layout.table_file(run, 0, name), *what) for name, what in SMALL.items())
    refs.append(files.write(layout.metrics_file(run, 0), b"{}"))
    prefix = layout.iteration_folder(run, 0) + "/"
    names = {ref.path.removeprefix(prefix): ref for ref in refs}
    writer = new_writer("benchmark")
    commit_manifest(files, Manifest(run, 0, "c", "l", "0", None, names, {}, DataCursor(), "now", writer))
    clear_staging(files, run, 0)


@pytest.fixture(scope="module")
def groups() -> list[list[Rollout]]:
    return [group("bench", query) for query in range(QUERY_COUNT)]


def stage(files: StoreFiles, groups: list[list[Rollout]]) -> None:
    for position, rollouts in enumerate(groups):
        stage_group(files, "bench", 0, position, rollouts)


def time_commits(benchmark: Any, groups: list[list[Rollout]], stores: Any) -> None:
    """A store of its own for every round: iteration 0 is committed once."""

    def setup() -> tuple[tuple[StoreFiles, str], dict[str, Any]]:
        files = next(stores)
        stage(files, groups)
        return (files, "bench"), {}

    benchmark.pedantic(commit, setup=setup, rounds=ROUNDS)


def test_a_commit_on_seaweedfs(benchmark, groups, seaweedfs_endpoint, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs_endpoint)
    files = StoreFiles(f"s3://store/{uuid.uuid4().hex}")
    stage(files, groups)
    commit(files, "bench")
    written = {path: files.read(path) for path in files.files_below("bench")}
    for path, data in written.items():
        (tmp_path / path.replace("/", "_")).write_bytes(data)
    plain: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for path in written:
            files.fs.put_file(str(tmp_path / path.replace("/", "_")), f"store/{uuid.uuid4().hex}")
        plain.append(time.perf_counter() - began)
    benchmark.extra_info["plain_put_file_s"] = min(plain)
    benchmark.extra_info["files"] = len(written)
    benchmark.extra_info["bytes"] = sum(map(len, written.values()))
    time_commits(benchmark, groups, (StoreFiles(f"s3://store/{uuid.uuid4().hex}") for _ in itertools.count()))
    assert benchmark.stats.stats.min <= MOST_S


def test_a_commit_on_a_local_disk(benchmark, groups, tmp_path: Path):
    time_commits(benchmark, groups, (StoreFiles(str(tmp_path / str(number))) for number in itertools.count()))
    assert benchmark.stats.stats.min <= MOST_S


def test_the_requests_of_a_commit(benchmark, groups, seaweedfs_endpoint, monkeypatch):
    with s3_proxy(seaweedfs_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        files = StoreFiles(f"s3://store/{uuid.uuid4().hex}")
        stage(files, groups)
        proxy.requests.clear()
        benchmark.pedantic(commit, args=(files, "bench"), rounds=1)
    if os.environ.get("SHOW_REQUESTS"):
        print(*proxy.requests, sep="\n")
    benchmark.extra_info["requests"] = len(proxy.requests)
    assert len(proxy.requests) <= MOST_REQUESTS
