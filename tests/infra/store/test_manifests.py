import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.manifests import (
    Manifest,
    PolicyStep,
    commit_manifest,
    is_committed,
    newest_committed,
    read_manifest,
)
from infra.store.writer import new_writer
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import AlreadyCommittedError, SchemaVersionError, TableIntegrityError
from tests.infra.store.small_run import make_version, manifest, start_run, write_iteration, write_run, write_tables


def bare(run: str = "r", iteration: int = 0, parent: str | None = None) -> Manifest:
    return Manifest(
        run, iteration, "c", "l", "0+test", parent, {}, {}, DataCursor(0, 4), "2026-12-01T00:00:00+00:00", None
    )


@pytest.fixture
def ready(local_files, tmp_path):
    """Tables and versions of iteration 0, not committed, and the manifest that would commit them."""
    start_run(local_files, "r", tmp_path)
    tables = write_tables(local_files, "r", 0)
    steps = {
        policy: PolicyStep(policy, 0, 1, make_version(local_files, "r", policy, 1, tmp_path, inputs="i").sha256)
        for policy in ("main", "sub")
    }
    return manifest("r", 0, tables, steps)


def test_a_manifest_comes_back_as_committed(files, tmp_path):
    start_run(files, "r", tmp_path)
    committed = write_iteration(files, "r", 0, tmp_path)
    assert read_manifest(files, "r", 0) == committed
    assert committed.manifest.cursor == DataCursor(0, 2)  # case H1: where the next batch begins is in the commit
    assert set(committed.manifest.files) == {
        "queries.parquet",
        "rewards.parquet",
        "alignment.parquet",
        "advantages.parquet",
        "trajectories/main-0000.parquet",
        "trajectories/searcher-0000.parquet",
        "updates/main.json",
        "updates/sub.json",
    }


def test_without_a_manifest_there_is_no_iteration(local_files, ready):  # case H5
    assert newest_committed(local_files, "r") == -1
    assert not is_committed(local_files, "r", 0)
    commit_manifest(local_files, ready)
    assert newest_committed(local_files, "r") == 0


def test_the_second_of_two_commits_fails_and_the_first_stands(files, tmp_path):
    start_run(files, "r", tmp_path)
    first = write_iteration(files, "r", 0, tmp_path)
    with pytest.raises(AlreadyCommittedError, match="iteration 0 of run 'r' is committed already"):
        commit_manifest(files, replace(first.manifest, created_at="2027-01-01T00:00:00+00:00"))
    assert read_manifest(files, "r", 0) == first


RACER = """
import sys, time
from pathlib import Path
from infra.store.files import StoreFiles
from infra.store.manifests import Manifest, commit_manifest
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import AlreadyCommittedError
files, name, gate = StoreFiles(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
for number in range(30):
    try:
        commit_manifest(files, Manifest(f"run{number}", 0, name, "l", "0", None, {}, {}, DataCursor(), "now", name))
    except AlreadyCommittedError:
        continue
    print(number, flush=True)
"""


def test_of_two_processes_that_race_to_commit_exactly_one_wins(tmp_path):
    store, gate = tmp_path / "store", tmp_path / "go"
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", RACER, str(store), name, str(gate)], stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b")
    }
    for racer in racers.values():
        assert racer.stdout.readline() == "ready\n"
    gate.touch()
    won = {name: [int(line) for line in racer.communicate(timeout=60)[0].split()] for name, racer in racers.items()}
    assert sorted(won["a"] + won["b"]) == list(range(30))
    files = StoreFiles(str(store))
    for name, numbers in won.items():
        for number in numbers:
            assert read_manifest(files, f"run{number}", 0).manifest.config_sha256 == name


def test_the_newest_of_ten_thousand_iterations_takes_few_looks(monkeypatch):
    files = StoreFiles("memory://many")
    for newest in (-1, 0, 1, 2, 6, 7, 9_999):
        looks = []

        def exists(path, newest=newest, looks=looks):
            looks.append(path)
            return int(path.split("/")[2]) <= newest

        monkeypatch.setattr(files, "exists", exists)
        assert newest_committed(files, "r") == newest
        assert len(looks) <= 29  # 1 + 14 to gallop past 10,000 + 13 halvings of the last stride + 1


@pytest.mark.parametrize("newest", range(-1, 20))
def test_the_newest_iteration_is_found_for_every_length(newest):
    files = StoreFiles(f"memory://length{newest}")
    for iteration in range(newest + 1):
        files.create(layout.manifest_file("r", iteration), b"{}")
    assert newest_committed(files, "r") == newest


def test_the_newest_iteration_is_seen_by_a_process_that_looked_before(each_s3_url, tmp_path):  # case E14
    reader, writer = StoreFiles(each_s3_url), StoreFiles(each_s3_url)
    start_run(writer, "r", tmp_path)
    assert newest_committed(reader, "r") == -1
    write_iteration(writer, "r", 0, tmp_path)
    assert newest_committed(reader, "r") == 0


def test_a_file_that_is_missing_stops_the_commit(local_files, ready):
    local_files.remove(ready.files["rewards.parquet"].path)
    with pytest.raises(TableIntegrityError, match=r"rewards\.parquet: it is missing.*nothing was committed"):
        commit_manifest(local_files, ready)
    assert not is_committed(local_files, "r", 0)


def test_a_file_that_another_process_replaced_stops_the_commit(local_files, ready):
    path = ready.files["rewards.parquet"].path
    StoreFiles(local_files.url).write(path, local_files.read(path))
    with pytest.raises(TableIntegrityError, match=r"another process wrote it since\. Two processes may be writing"):
        commit_manifest(local_files, ready)
    assert not is_committed(local_files, "r", 0)


def test_a_policy_version_that_is_missing_or_another_stops_the_commit(local_files, ready, tmp_path):  # case H6
    steps = {**ready.policies, "sub": replace(ready.policies["sub"], sha256="0" * 64)}
    with pytest.raises(TableIntegrityError, match="another version 1 of policy 'sub'"):
        commit_manifest(local_files, replace(ready, policies=steps))
    local_files.remove(layout.version_file("r", "sub", 1))
    with pytest.raises(TableIntegrityError, match=r"sub/00000001/version\.json: missing"):
        commit_manifest(local_files, ready)
    assert not is_committed(local_files, "r", 0)


def test_a_parent_that_is_not_the_iteration_before_stops_the_commit(local_files, ready):
    commit_manifest(local_files, ready)
    with pytest.raises(TableIntegrityError, match="iteration 1 of run 'r': its parent is none"):
        commit_manifest(local_files, bare(iteration=1, parent=None))
    with pytest.raises(TableIntegrityError, match="its parent is 000000000000"):
        commit_manifest(local_files, bare(iteration=1, parent="0" * 64))
    with pytest.raises(TableIntegrityError, match=r"00000004/manifest\.json: missing"):
        commit_manifest(local_files, bare(iteration=5, parent="0" * 64))


def test_a_file_outside_the_iteration_is_not_committed(local_files, ready):
    tables = {**ready.files, "rewards.parquet": ready.files["alignment.parquet"]}
    with pytest.raises(TableIntegrityError, match=r"rewards\.parquet is at .*alignment\.parquet"):
        commit_manifest(local_files, replace(ready, files=tables))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"schema_version": 1, "files": 3}'])
def test_what_is_no_manifest_is_said_to_be_none(local_files, content):
    local_files.create(layout.manifest_file("r", 0), content)
    with pytest.raises(TableIntegrityError, match="is no manifest"):
        read_manifest(local_files, "r", 0)


def test_a_manifest_of_version_1_which_named_no_writer_is_readable(local_files, ready):
    raw = json.loads(ready.to_bytes()) | {"schema_version": 1}
    del raw["writer"]
    local_files.create(layout.manifest_file("r", 0), json.dumps(raw).encode())
    found = read_manifest(local_files, "r", 0).manifest
    assert found == replace(ready, schema_version=1, writer=None)
    with pytest.raises(AlreadyCommittedError, match=r"by another process or an earlier attempt\. Theirs stands"):
        commit_manifest(local_files, ready)


def test_a_manifest_of_version_2_without_a_writer_is_none(local_files):
    raw = json.loads(bare().to_bytes())
    del raw["writer"]
    local_files.create(layout.manifest_file("r", 0), json.dumps(raw).encode())
    with pytest.raises(TableIntegrityError, match="is no manifest"):
        read_manifest(local_files, "r", 0)


def test_the_loser_of_two_equal_commits_learns_who_won(files, tmp_path):
    start_run(files, "r", tmp_path)
    tables = write_tables(files, "r", 0)
    one, two = new_writer("run one"), new_writer("run one")
    assert one != two
    commit_manifest(files, manifest("r", 0, tables, {}, writer=one))
    with pytest.raises(AlreadyCommittedError) as caught:
        commit_manifest(files, manifest("r", 0, tables, {}, writer=two))
    assert f"committed already, by {one}. Theirs stands" in str(caught.value)
    assert f"This was {two}." in str(caught.value)


def test_a_writer_is_named_by_its_label_host_and_process():
    said = re.escape(f"brave-fox (process {os.getpid()} on {socket.gethostname()}, ") + "[0-9a-f]{8}[)]"
    assert re.fullmatch(said, new_writer("brave-fox"))


def test_a_manifest_of_a_newer_mgrpo_is_refused_with_the_way_out(local_files):
    raw = json.loads(bare().to_bytes()) | {"schema_version": 99, "something_new": 1}
    local_files.create(layout.manifest_file("r", 0), json.dumps(raw).encode())
    with pytest.raises(SchemaVersionError, match=r"manifest version 99.*Install a newer mgrpo"):
        read_manifest(local_files, "r", 0)


def test_a_manifest_of_another_run_or_iteration_is_refused(local_files, tmp_path):
    write_run(local_files, "r", tmp_path, 1)
    data = local_files.read(layout.manifest_file("r", 0))
    local_files.create(layout.manifest_file("r", 1), data)
    local_files.create(layout.manifest_file("other", 0), data)
    for run, iteration in (("r", 1), ("other", 0)):
        with pytest.raises(TableIntegrityError, match="is the manifest of iteration 0 of run 'r'"):
            read_manifest(local_files, run, iteration)


def test_equal_manifests_have_equal_bytes():
    assert bare().to_bytes() == bare().to_bytes()
    assert json.loads(bare().to_bytes())["parent_sha256"] is None


def test_what_was_written_is_remembered_until_the_commit_only(local_files, ready):
    ref = ready.files["rewards.parquet"]
    place = local_files.local(ref.path)
    data = place.read_bytes()
    place.write_bytes(data[:-1] + b"?")
    assert local_files.changed_since_written(ref) == "another process wrote it since"
    local_files.write(ref.path, data)
    commit_manifest(local_files, ready)
    place.write_bytes(data[:-1] + b"?")
    assert local_files.changed_since_written(ref) is None  # the manifest's hash answers from here on
