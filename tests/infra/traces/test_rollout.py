"""A rollout as a tree, read from its own row groups alone."""

import pyarrow.parquet as pq
import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.store.tables import read_table, table_writer
from infra.traces.rollout import Component, read_rollout
from mgrpo_core.errors import StoreError, TableIntegrityError
from tests.infra.store.small_run import rollouts, write_run


@pytest.fixture
def stored(tmp_path) -> StoredIteration:
    return open_stored(write_run(StoreFiles(str(tmp_path / "store")), "r", tmp_path / "scratch", 1), 0)


def test_sub_agents_stand_under_who_called_them(stored):
    trace = read_rollout(stored, "q1", 1, tokens=True)
    assert trace.query.question == "What is it?"
    main, first, second = rollouts("r", 0, "q1")[1].trajectories
    assert trace.root.trajectory.trajectory_id == main.trajectory_id
    assert [child.trajectory.trajectory_id for child in trace.root.children] == [
        first.trajectory_id,
        second.trajectory_id,
    ]
    assert trace.root.trajectory.token_ids.tolist() == main.token_ids.tolist()
    assert trace.root.reward is not None
    assert trace.root.reward.components == (Component("format", 1.0, 0.1),)
    assert trace.root.advantage is not None
    assert trace.root.advantage.group_size == 10


def test_tokens_are_read_only_where_they_are_wanted(stored):
    assert read_rollout(stored, "q0", 0, tokens=False).root.trajectory.token_ids.size == 0


def test_other_row_groups_are_not_read(stored, monkeypatch):
    path = layout.trajectories_file("r", 0, "main", 0)
    whole = read_table(stored.files, path, TRAJECTORIES)
    stored.files.remove(layout.manifest_file("r", 0))  # or the store would not have its file replaced
    with table_writer(stored.files, path, TRAJECTORIES) as writer:
        for row in range(whole.num_rows):
            writer.write(whole.slice(row, 1))
            writer.flush()
    read: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group

    def noting(self, group, columns=None, **options):
        if self.schema_arrow.metadata[b"mgrpo.path"] == path.encode():
            read.append(group)
        return read_row_group(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noting)
    read_rollout(stored, "q1", 0, tokens=True)
    assert read == [2, 3]  # q1's two rollouts


def test_a_query_that_is_not_there_is_answered_with_those_that_are(stored):
    with pytest.raises(StoreError, match=r"iteration 0 of run 'r' has no query 'q9'\. It has q0, q1"):
        read_rollout(stored, "q9", 0, tokens=False)


def test_a_rollout_that_is_not_there_is_answered_with_those_that_are(stored):
    with pytest.raises(StoreError, match=r"query 'q1' has no rollout 7\. Rollouts there: 0, 1"):
        read_rollout(stored, "q1", 7, tokens=False)


def test_a_trajectory_whose_parent_is_lost_is_named(stored):
    path = layout.trajectories_file("r", 0, "main", 0)
    whole = read_table(stored.files, path, TRAJECTORIES)
    stored.files.remove(layout.manifest_file("r", 0))
    with table_writer(stored.files, path, TRAJECTORIES) as writer:
        writer.write(whole.slice(1))
    with pytest.raises(
        TableIntegrityError, match=r"main/0:searcher of query 'q0'\) has no parent\. Run `mgrpo verify`"
    ):
        read_rollout(stored, "q0", 0, tokens=False)
