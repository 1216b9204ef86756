"""The index of an iteration: every trajectory once, joined by id, and no column of tokens or text read."""

import pyarrow.parquet as pq
import pytest

from infra.store.files import StoreFiles
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.traces.index import trajectory_index
from mgrpo_core.errors import ConfigError
from tests.infra.store.small_run import write_run


@pytest.fixture
def stored(tmp_path) -> StoredIteration:
    run = write_run(StoreFiles(str(tmp_path / "store")), "r", tmp_path / "scratch", 1)
    return open_stored(run, 0)


def test_every_trajectory_is_there_once_with_its_reward_and_credit(stored):
    rows = trajectory_index(stored).to_pylist()
    assert len(rows) == 2 * (2 + 3)  # two queries: rollouts with 1 and 2 invocations
    places = [(row["query_id"], row["rollout_index"], row["agent_path"]) for row in rows]
    assert places[:5] == [
        ("q0", 0, "main"),
        ("q0", 0, "main/0:searcher"),
        ("q0", 1, "main"),
        ("q0", 1, "main/0:searcher"),
        ("q0", 1, "main/1:searcher"),
    ]
    # small_run gives rewards 0, 0.5, 1 in turn, in this order, and 2 r - 1 as the advantage.
    assert [row["reward"] for row in rows[:5]] == [0, 0.5, 1, 0, 0.5]
    assert [row["advantage"] for row in rows[:5]] == [-1, 0, 1, -1, 0]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["reward_status"] for row in rows} == {"scored"}


def test_only_what_fits_a_line_is_read(stored, monkeypatch):
    read: set[str] = set()
    whole = pq.ParquetFile.read_row_group

    def noting(self, group, columns=None, **options):
        read.update(columns or self.schema_arrow.names)
        return whole(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noting)
    trajectory_index(stored)
    assert not read & {"token_ids", "loss_mask", "logprobs", "turns", "messages", "task", "reply"}


def test_an_iteration_that_is_not_committed_is_named(tmp_path):
    run = write_run(StoreFiles(str(tmp_path / "store")), "r", tmp_path / "scratch", 1)
    with pytest.raises(ConfigError, match=r"iteration 3 of run 'r' is not committed\. Committed: 0 to 0"):
        open_stored(run, 3)
