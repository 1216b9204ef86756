import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from infra.store import layout, staging, tables
from infra.store.schemas import TRAJECTORIES
from infra.store.staging import materialize, stage_group, staged_groups
from infra.store.tables import read_table, write_table
from infra.store.trajectory_rows import trajectories_of, trajectories_table
from mgrpo_core.errors import AlreadyCommittedError, TableIntegrityError
from mgrpo_core.trajectories import Rollout
from tests.infra.store.small_run import AGENTS, rollouts


def stage(files, position, query_id=None, calls=(1, 2), tokens=8):
    group = rollouts("r", 0, query_id or f"q{position}", calls, tokens)
    stage_group(files, "r", 0, position, group)
    return group


def ids(files, refs):
    return read_table(files, [ref.path for ref in refs], TRAJECTORIES, ["trajectory_id"]).column(0).to_pylist()


def test_staged_groups_are_known_by_their_position_alone(files):
    assert staged_groups(files, "r", 0) == {}
    for position in (7, 0, 12):
        stage(files, position)
    assert staged_groups(files, "r", 0).keys() == {0, 7, 12}
    assert staged_groups(files, "r", 1) == {}


def test_a_group_that_was_cut_off_or_moved_is_rolled_out_again(local_files):  # case E11
    for position in range(4):
        stage(local_files, position)
    data = local_files.read(layout.staged_group("r", 0, 1))
    local_files.write(layout.staged_group("r", 0, 1), data[: len(data) // 2])
    local_files.write(layout.staged_group("r", 0, 2), local_files.read(layout.staged_group("r", 0, 3)))
    local_files.write(f"{layout.staging_folder('r', 0)}/notes.txt", b"not ours")
    Path(local_files.full(f"{layout.staging_folder('r', 0)}/.tmp-1234")).write_bytes(b"killed while writing")
    assert staged_groups(local_files, "r", 0).keys() == {0, 3}


def test_materializing_twice_gives_the_same_bytes(files):  # case E13
    for position in range(3):
        stage(files, position)
    first = materialize(files, "r", 0, range(3), AGENTS)
    again = materialize(files, "r", 0, range(3), AGENTS)
    assert first == again
    for ref in itertools.chain(*first.values()):
        assert files.sha256(ref.path) == (ref.sha256, ref.bytes)


def test_every_trajectory_is_in_its_agents_table_once_in_query_and_rollout_order(local_files):  # case E13
    groups = [stage(local_files, position, calls=(2, 0, 11)) for position in range(2)]
    refs = materialize(local_files, "r", 0, range(2), AGENTS)
    made = [one for group in groups for rollout in group for one in rollout.trajectories]
    for agent in AGENTS:
        expected = [one.trajectory_id for one in made if one.key.agent == agent]  # invocation 10 after 2, not before
        assert ids(local_files, refs[agent]) == expected
        assert sum(ref.rows for ref in refs[agent]) == len(expected)
    found = trajectories_of(read_table(local_files, refs["main"][0].path, TRAJECTORIES))
    np.testing.assert_array_equal(found[0].token_ids, made[0].token_ids)


def test_the_order_in_which_groups_and_rollouts_finished_leaves_no_trace(local_files):  # case A9
    groups = [rollouts("r", 0, f"q{position}", (2, 1, 3)) for position in range(3)]
    for position, group in enumerate(groups):
        stage_group(local_files, "r", 0, position, group)
    first = materialize(local_files, "r", 0, range(3), AGENTS)
    local_files.remove_folder(layout.staging_folder("r", 0))
    for position in (2, 0, 1):
        shuffled = [Rollout(one.query_id, one.rollout_index, one.trajectories[::-1]) for one in groups[position][::-1]]
        stage_group(local_files, "r", 0, position, shuffled)
    assert materialize(local_files, "r", 0, [2, 0, 1], AGENTS) == first


def test_an_agent_that_was_never_called_has_a_table_of_no_rows(files):  # case D1
    stage(files, 0, calls=(0, 0, 0, 0))
    refs = materialize(files, "r", 0, [0], (*AGENTS, "reader"))
    for agent in ("searcher", "reader"):
        (ref,) = refs[agent]
        assert ref.rows == 0
        assert read_table(files, ref.path, TRAJECTORIES).schema.equals(TRAJECTORIES.columns)
    assert refs["main"][0].rows == 4


def test_a_missing_group_is_named(files):
    stage(files, 0)
    with pytest.raises(TableIntegrityError, match=r"staging/00000001\.parquet: missing"):
        materialize(files, "r", 0, range(2), AGENTS)


def test_a_group_under_another_position_is_refused(local_files):
    stage(local_files, 0)
    local_files.write(layout.staged_group("r", 0, 1), local_files.read(layout.staged_group("r", 0, 0)))
    with pytest.raises(TableIntegrityError, match=r"00000001\.parquet: holds query_position 0, expected 1"):
        materialize(local_files, "r", 0, range(2), AGENTS)


def test_a_group_of_another_iteration_is_refused(local_files):
    stage(local_files, 0)
    local_files.write(layout.staged_group("r", 1, 0), local_files.read(layout.staged_group("r", 0, 0)))
    with pytest.raises(TableIntegrityError, match="holds iteration 0, expected 1"):
        materialize(local_files, "r", 1, [0], AGENTS)


@pytest.mark.parametrize("where", ["one group", "two groups"])
def test_a_trajectory_that_comes_twice_is_refused(local_files, where):  # case E13
    group = stage(local_files, 0, query_id="q")
    if where == "one group":
        twice = [(0, one) for rollout in (*group, group[0]) for one in rollout.trajectories]
        write_table(local_files, layout.staged_group("r", 0, 0), TRAJECTORIES, trajectories_table(twice))
    else:
        stage(local_files, 1, query_id="q")
    with pytest.raises(TableIntegrityError, match="comes twice"):
        materialize(local_files, "r", 0, [0] if where == "one group" else [0, 1], AGENTS)


def test_a_trajectory_of_an_agent_that_the_run_has_not_is_refused(local_files):  # case D10
    stage(local_files, 0)
    with pytest.raises(TableIntegrityError, match="'searcher', which is no agent of this run"):
        materialize(local_files, "r", 0, [0], ["main"])


def test_a_large_table_is_cut_into_shards_of_whole_groups(local_files, monkeypatch):
    monkeypatch.setattr(staging, "FILE_BYTES", 30_000)
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 10_000)
    for position in range(8):
        stage(local_files, position, calls=(2, 2), tokens=300)
    refs = materialize(local_files, "r", 0, range(8), AGENTS)
    shards = refs["searcher"]
    assert [ref.path.rsplit("/", 1)[1] for ref in shards] == [f"searcher-{n:04d}.parquet" for n in range(len(shards))]
    assert len(shards) > 2
    for ref in shards:
        table = read_table(local_files, ref.path, TRAJECTORIES)
        file = pq.ParquetFile(local_files.full(ref.path))
        assert table.nbytes <= 30_000
        assert all(file.read_row_group(index).nbytes <= 10_000 for index in range(file.num_row_groups))
    assert len(set(ids(local_files, shards))) == 8 * 4


def test_shards_of_an_earlier_larger_attempt_are_gone(local_files, monkeypatch):
    stage(local_files, 0, calls=(3, 3), tokens=500)
    monkeypatch.setattr(staging, "FILE_BYTES", 1)
    stage(local_files, 1)
    assert len(materialize(local_files, "r", 0, range(2), AGENTS)["searcher"]) == 2
    monkeypatch.undo()
    refs = materialize(local_files, "r", 0, range(2), AGENTS)
    assert local_files.names(layout.trajectories_folder("r", 0)) == ["main-0000.parquet", "searcher-0000.parquet"]
    assert len(ids(local_files, refs["searcher"])) == 6 + 3


def test_materializing_holds_no_more_than_a_few_row_groups_in_memory(local_files, monkeypatch):
    import pyarrow as pa

    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 200_000)
    for position in range(40):
        stage(local_files, position, calls=(2, 2), tokens=10_000)
    before = pa.total_allocated_bytes()
    highest = 0
    original = tables.TableWriter.write

    def watched(self, table):
        nonlocal highest
        highest = max(highest, pa.total_allocated_bytes() - before)
        original(self, table)

    monkeypatch.setattr(tables.TableWriter, "write", watched)
    refs = materialize(local_files, "r", 0, range(40), AGENTS)
    total = sum(read_table(local_files, ref.path, TRAJECTORIES).nbytes for shards in refs.values() for ref in shards)
    assert total > 15_000_000  # 240 trajectories x 10,000 tokens x (4 + 4 + 1/8) bytes, and nulls
    assert highest < total / 4


def test_staging_into_a_committed_iteration_is_refused(files):
    stage(files, 0)
    files.create(layout.manifest_file("r", 0), b"{}")
    with pytest.raises(AlreadyCommittedError):
        stage(files, 0)


def test_staging_a_group_again_replaces_it(files):  # case E13
    stage(files, 0, calls=(2, 2))
    group = stage(files, 0, calls=(1, 1))
    refs = materialize(files, "r", 0, [0], AGENTS)
    expected = [one.trajectory_id for made in group for one in made.trajectories if one.key.agent == "searcher"]
    assert ids(files, refs["searcher"]) == expected


def test_a_failed_trajectory_keeps_its_row_and_its_reason(local_files):  # case D5
    (made,) = rollouts("r", 0, "q0", (0,))
    lost = replace(made.trajectories[0], failure="server gone \ud83d", reply=None, turns=())
    stage_group(local_files, "r", 0, 0, [Rollout("q0", 0, (lost,))])
    refs = materialize(local_files, "r", 0, [0], AGENTS)
    rows = read_table(local_files, refs["main"][0].path, TRAJECTORIES, ["failure", "reply", "policy_version"])
    assert rows.to_pylist() == [{"policy_version": None, "reply": None, "failure": "server gone \ufffd"}]


def test_a_kill_while_materializing_leaves_groups_and_whole_tables_only(local_files):
    import signal
    import subprocess
    import sys

    for position in range(3):
        stage(local_files, position)
    script = (
        "import sys, time\n"
        "from infra.store import staging\n"
        "from infra.store.files import StoreFiles\n"
        "read, seen = staging._read_group, []\n"
        "def slow(*args):\n"
        "    if len(seen) == 2:\n"
        "        print('under way', flush=True); time.sleep(600)\n"
        "    seen.append(1)\n"
        "    return read(*args)\n"
        "staging._read_group = slow\n"
        "staging.materialize(StoreFiles(sys.argv[1]), 'r', 0, range(3), ('main', 'searcher'))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, local_files.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "under way\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert local_files.names(layout.trajectories_folder("r", 0)) == []
    assert staged_groups(local_files, "r", 0).keys() == {0, 1, 2}
    assert materialize(local_files, "r", 0, range(3), AGENTS)["main"][0].rows == 6
