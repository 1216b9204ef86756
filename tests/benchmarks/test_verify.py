"""`verify` of a gigabyte against plain sha256 over the same files, one after the other: 0.7 of its speed is wanted."""

import time
from pathlib import Path
from typing import Any

import pytest

from infra.store.files import StoreFiles
from infra.store.hashing import sha256_of
from infra.store.runs import StoredRun
from infra.store.verify import verify_run
from tests.infra.replay.large_iteration import RUN, write_large_iteration

QUERIES, ROLLOUTS, CALLS, TOKENS = 900, 8, 8, 8_000  # 64,800 trajectories, 1.2 GB


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    files = StoreFiles(str(tmp_path_factory.mktemp("verify")))
    return write_large_iteration(files, QUERIES, rollouts=ROLLOUTS, calls=CALLS, tokens=TOKENS)


@pytest.mark.timeout(1200)
def test_verifying_against_plain_sha256(benchmark: Any, run: StoredRun):
    """The fastest of five calls each, in turns: others share the cores."""
    paths = [path for path in Path(run.files.full(RUN)).rglob("*.parquet") if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    plain: list[float] = []

    def hash_all() -> None:
        began = time.perf_counter()
        for path in paths:
            sha256_of(path)
        plain.append(time.perf_counter() - began)

    found = benchmark.pedantic(verify_run, args=(run,), setup=hash_all, rounds=5)
    assert found.sound
    assert found.bytes >= size
    benchmark.extra_info["gigabytes"] = size / 1e9
    benchmark.extra_info["plain_sha256_s"] = min(plain)
    benchmark.extra_info["share_of_plain_sha256"] = min(plain) / benchmark.stats.stats.min
