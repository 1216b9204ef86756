"""Each way in which a run can be wrong has a name: which iteration, which file, what."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.manifests import PolicyStep, commit_manifest, read_manifest
from infra.store.policies import require_version
from infra.store.runs import StoredRun
from infra.store.schemas import ADVANTAGES, ALIGNMENT, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import read_table, table_of
from infra.store.verify import Verification, verify_run
from mgrpo_core.errors import SchemaVersionError
from tests.infra.store import small_run

ITERATIONS = 3
_SMALL = {"rewards": REWARDS, "alignment": ALIGNMENT, "advantages": ADVANTAGES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one run of three iterations, to be copied and then damaged."""
    folder = tmp_path_factory.mktemp("verify")
    small_run.write_run(StoreFiles(str(folder / "store")), "r", folder, ITERATIONS)
    return folder / "store"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> StoredRun:
    shutil.copytree(whole, tmp_path / "store")
    return StoredRun(StoreFiles(str(tmp_path / "store")), "r")


def place(run: StoredRun, path: str) -> Path:
    return Path(run.files.full(path))


def faults(run: StoredRun) -> list[tuple[int, str]]:
    return [(fault.iteration, fault.where) for fault in verify_run(run).faults]


def told(run: StoredRun) -> list[tuple[str, str]]:
    return [(fault.where, fault.what) for fault in verify_run(run).faults]


def only_fault(run: StoredRun, iteration: int, where: str) -> str:
    """What the one fault says, once it is the one that is expected."""
    found = verify_run(run)
    assert [(fault.iteration, fault.where) for fault in found.faults] == [(iteration, where)]
    assert found.usable_through == iteration - 1
    assert not found.sound
    return found.faults[0].what


def edit_manifest(run: StoredRun, iteration: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest in place, and nothing that depends on it."""
    path = place(run, layout.manifest_file("r", iteration))
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw, sort_keys=True, indent=1) + "\n")


def reseal(run: StoredRun, iteration: int, name: str) -> None:
    """Have the manifest vouch for a changed table and its rows: the chain and the hashes hold, what it says may not.

    Only for the newest iteration: an older one's manifest has its hash in the next.
    """
    path = f"{layout.iteration_folder('r', iteration)}/{name}"
    sha256, size = run.files.sha256(path)
    rows = pq.read_metadata(place(run, path)).num_rows
    edit_manifest(
        run,
        iteration,
        lambda raw: raw["files"].__setitem__(name, {"path": path, "sha256": sha256, "bytes": size, "rows": rows}),
    )


def rewrite(run: StoredRun, iteration: int, name: str, schema: TableSchema, change: Callable[[dict], None]) -> None:
    """Change a table's rows, by its own schema, and reseal it."""
    path = f"{layout.iteration_folder('r', iteration)}/{name}"
    columns = read_table(run.files, path, schema).to_pydict()
    change(columns)
    pq.write_table(table_of(schema, columns), place(run, path))
    reseal(run, iteration, name)


def drop_last_row(columns: dict[str, list[Any]]) -> None:
    for values in columns.values():
        values.pop()


def test_a_whole_run_is_sound_and_every_file_is_counted(run):
    found = verify_run(run)
    folder = place(run, "r")
    counted = [path for path in folder.rglob("*") if path.is_file()]
    # Not counted as files of an iteration: run.json, the config, the manifests, the version records.
    records = [path for path in counted if path.name in ("run.json", "manifest.json", "version.json")]
    plain = [path for path in counted if path not in records and path.parent.name != "configs"]
    assert found == Verification(
        run="r",
        iterations=ITERATIONS,
        files=len(plain),
        bytes=sum(path.stat().st_size for path in plain),
        faults=(),
        usable_through=ITERATIONS - 1,
    )
    assert found.sound


def test_a_run_on_an_object_store_is_sound(each_s3_url, tmp_path):
    assert verify_run(small_run.write_run(StoreFiles(each_s3_url), "r", tmp_path, 1)).sound


def test_verifying_changes_nothing(run):
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(run.files.root).rglob("*")}

    before = state()
    verify_run(run)
    assert state() == before


def test_a_run_without_an_iteration_is_sound(tmp_path):
    files = StoreFiles(str(tmp_path / "store"))
    run = small_run.start_run(files, "r", tmp_path)
    found = verify_run(run)
    assert (found.sound, found.iterations, found.usable_through) == (True, 0, -1)


def test_a_changed_byte_is_found_in_any_file(run):
    for name in read_manifest(run.files, "r", 1).manifest.files:
        path = place(run, f"{layout.iteration_folder('r', 1)}/{name}")
        original = path.read_bytes()
        middle = len(original) // 2
        path.write_bytes(original[:middle] + bytes([original[middle] ^ 1]) + original[middle + 1 :])
        assert "changed after it was committed" in only_fault(run, 1, name)
        path.write_bytes(original)
    assert verify_run(run).sound


def test_a_cut_file_is_told_by_its_size(run):  # case E11
    path = place(run, layout.table_file("r", 2, "rewards"))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    assert f"{size // 2} bytes" in only_fault(run, 2, "rewards.parquet")


def test_a_missing_file_is_named(run):
    place(run, layout.trajectories_file("r", 1, "searcher", 0)).unlink()
    assert "missing" in only_fault(run, 1, "trajectories/searcher-0000.parquet")


def test_two_swapped_files_are_both_named(run):
    left, right = (place(run, layout.trajectories_file("r", 1, agent, 0)) for agent in ("main", "searcher"))
    held = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(held)
    assert faults(run) == [(1, "trajectories/main-0000.parquet"), (1, "trajectories/searcher-0000.parquet")]


def test_a_table_that_no_manifest_names_is_named(run):
    shutil.copy(
        place(run, layout.trajectories_file("r", 1, "main", 0)), place(run, layout.trajectories_file("r", 1, "main", 1))
    )
    assert "not in the manifest" in only_fault(run, 1, "trajectories/main-0001.parquet")


def test_what_a_kill_left_in_staging_is_no_fault(run):
    small_run.stage_group(run.files, "r", ITERATIONS, 0, small_run.rollouts("r", ITERATIONS, "q0"))
    staged = place(run, layout.staged_group("r", ITERATIONS, 0))
    left = place(run, layout.staged_group("r", 1, 0))
    left.parent.mkdir()
    shutil.copy(staged, left)
    assert verify_run(run).sound


def test_swapped_iterations_are_found_by_what_their_manifests_say(run):
    one, two = (place(run, layout.iteration_folder("r", iteration)) for iteration in (1, 2))
    held = one.with_name("held")
    one.rename(held)
    two.rename(one)
    held.rename(two)
    found = verify_run(run)
    assert [(fault.iteration, fault.where) for fault in found.faults] == [(1, "manifest.json"), (2, "manifest.json")]
    assert "is the manifest of iteration 2" in found.faults[0].what
    assert found.usable_through == 0


def test_a_replaced_link_of_the_chain_is_found_at_the_next(run):
    edit_manifest(run, 1, lambda raw: raw.__setitem__("created_at", "2027-01-01T00:00:00+00:00"))
    what = only_fault(run, 2, "manifest.json")
    assert what.startswith(f"its parent is {read_manifest(run.files, 'r', 2).manifest.parent_sha256[:12]}")


def test_a_first_iteration_with_a_parent_is_found(run):
    edit_manifest(run, 0, lambda raw: raw.__setitem__("parent_sha256", "0" * 64))
    assert (0, "manifest.json") in faults(run)


def test_a_manifest_of_another_run_is_found(run):
    edit_manifest(run, 2, lambda raw: raw.__setitem__("run", "another"))
    assert "is the manifest of iteration 2 of run 'another'" in only_fault(run, 2, "manifest.json")


def test_a_manifest_that_is_no_json_is_found(run):
    place(run, layout.manifest_file("r", 2)).write_bytes(b'{"run": ')
    assert "is no manifest" in only_fault(run, 2, "manifest.json")


def test_a_missing_iteration_is_found_with_those_behind_it(run):
    shutil.rmtree(place(run, layout.iteration_folder("r", 1)))
    found = verify_run(run)
    assert [(fault.iteration, fault.where) for fault in found.faults] == [(1, "00000002")]
    assert (found.iterations, found.usable_through) == (1, 0)


def test_another_number_of_rows_than_the_manifest_says_is_found(run):
    edit_manifest(run, 2, lambda raw: raw["files"]["queries.parquet"].__setitem__("rows", 5))
    assert only_fault(run, 2, "queries.parquet") == "2 rows, the manifest says 5."


@pytest.mark.parametrize("table", ["rewards", "advantages"])
def test_a_trajectory_without_its_row_is_found(run, table):
    rewrite(run, 2, f"{table}.parquet", _SMALL[table], drop_last_row)
    assert only_fault(run, 2, f"{table}.parquet") == "9 rows for 10 trajectories, expected one each."


@pytest.mark.parametrize("table", ["rewards", "advantages", "alignment"])
def test_a_row_of_no_trajectory_is_found(run, table):
    rewrite(
        run, 2, f"{table}.parquet", _SMALL[table], lambda columns: columns["trajectory_id"].__setitem__(0, "f" * 32)
    )
    assert f"1 rows name no trajectory, the first {'f' * 32}" in only_fault(run, 2, f"{table}.parquet")


def test_a_slot_that_nothing_fills_is_no_fault(run):
    def empty(columns: dict[str, list[Any]]) -> None:
        columns["trajectory_id"][-1], columns["weight"][-1] = None, 0.0

    rewrite(run, 2, "alignment.parquet", ALIGNMENT, empty)
    assert verify_run(run).sound


def test_a_trajectory_that_comes_twice_is_found(run):  # case E13
    def repeat(columns: dict[str, list[Any]]) -> None:
        for values in columns.values():
            values[1] = values[0]

    rewrite(run, 2, "trajectories/main-0000.parquet", TRAJECTORIES, repeat)
    assert ("trajectories", "1 trajectory ids come twice.") in told(run)


def test_a_sub_trajectory_without_its_parent_is_found(run):
    rewrite(
        run,
        2,
        "trajectories/searcher-0000.parquet",
        TRAJECTORIES,
        lambda columns: columns["parent_id"].__setitem__(0, "f" * 32),
    )
    assert f"1 parents are no trajectory, the first {'f' * 32}" in only_fault(run, 2, "trajectories")


def test_a_trajectory_of_no_query_is_found(run):
    rewrite(
        run,
        2,
        "trajectories/main-0000.parquet",
        TRAJECTORIES,
        lambda columns: columns["query_id"].__setitem__(0, "q9"),
    )
    assert "query 'q9' is not in queries.parquet" in only_fault(run, 2, "trajectories/main-0000.parquet")


def test_a_manifest_that_leaves_a_table_out_is_found(run):
    edit_manifest(run, 2, lambda raw: raw["files"].pop("alignment.parquet"))
    assert ("manifest.json", "names no alignment.parquet. Restore the manifest.") in told(run)


def test_a_manifest_that_points_outside_its_iteration_is_found(run):
    other = layout.table_file("r", 1, "rewards")
    edit_manifest(run, 2, lambda raw: raw["files"]["rewards.parquet"].__setitem__("path", other))
    assert f"places it at {other}" in only_fault(run, 2, "rewards.parquet")


def test_a_changed_policy_file_is_found_in_the_iteration_that_made_it(run):
    path = place(run, f"{layout.policy_folder('r', 'sub', 2)}/model.safetensors")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    assert "model.safetensors changed after it was written" in only_fault(run, 1, "policies/sub/2")


def test_a_missing_policy_file_in_a_folder_is_found(run):
    place(run, f"{layout.policy_folder('r', 'main', 3)}/extra/template.jinja").unlink()
    assert "extra/template.jinja: missing" in only_fault(run, 2, "policies/main/3")


def test_a_changed_first_version_is_found(run):
    place(run, f"{layout.policy_folder('r', 'main', 0)}/tokenizer.json").write_text("[]")
    assert "tokenizer.json changed" in only_fault(run, 0, "policies/main/0")


def test_a_version_without_its_record_is_found(run):  # case H5
    place(run, layout.version_file("r", "sub", 3)).unlink()
    assert "missing or incomplete" in only_fault(run, 2, "policies/sub/3")


def test_versions_that_changed_places_are_found(run):
    two, three = (place(run, layout.policy_folder("r", "sub", version)) for version in (2, 3))
    held = two.with_name("held")
    two.rename(held)
    three.rename(two)
    held.rename(three)
    assert {iteration for iteration, _ in faults(run)} == {1, 2}
    assert {where for _, where in faults(run)} == {"policies/sub/2", "policies/sub/3"}


def test_a_version_made_anew_from_other_inputs_is_found(run, tmp_path):
    # The same number, whole in itself, but not what iteration 2 committed.
    shutil.rmtree(place(run, layout.policy_folder("r", "sub", 3)))
    small_run.make_version(run.files, "r", "sub", 3, tmp_path, inputs="other rollouts")
    assert "the manifest says" in only_fault(run, 2, "policies/sub/3")


def test_a_version_made_from_another_than_the_one_before_is_found(run):
    path = place(run, layout.version_file("r", "sub", 3))
    data = json.dumps(json.loads(path.read_text()) | {"parent_sha256": "d" * 64}).encode()
    path.write_bytes(data)
    edit_manifest(run, 2, lambda raw: raw["policies"]["sub"].update(sha256=hashlib.sha256(data).hexdigest()))
    assert "was made from dddddddddddd" in only_fault(run, 2, "policies/sub/3")


def test_a_pair_of_versions_that_never_was_is_found(run):  # case H6
    edit_manifest(run, 2, lambda raw: raw["policies"]["sub"].update(from_version=1))
    assert any("starts from version 1, the iteration before ended at 2" in what for _, what in told(run))


def test_a_missing_config_is_found(run):
    sha256 = read_manifest(run.files, "r", 0).manifest.config_sha256
    place(run, layout.config_file("r", sha256)).unlink()
    assert faults(run) == [(iteration, "config") for iteration in range(ITERATIONS)]


def test_a_changed_config_is_found(run):
    sha256 = read_manifest(run.files, "r", 0).manifest.config_sha256
    path = place(run, layout.config_file("r", sha256))
    path.write_text(path.read_text().replace('"queries_per_iteration":2', '"queries_per_iteration":3'))
    assert all("content differs from its name" in what for _, what in told(run))
    assert len(faults(run)) == ITERATIONS


def test_a_table_of_a_newer_mgrpo_is_named(run):
    path = layout.table_file("r", 2, "rewards")
    table = pq.read_table(place(run, path))
    newer = {**table.schema.metadata, b"mgrpo.schema_version": b"99"}
    pq.write_table(table.replace_schema_metadata(newer), place(run, path))
    reseal(run, 2, "rewards.parquet")
    assert "SchemaVersionError" in only_fault(run, 2, "tables")


def test_a_manifest_of_a_newer_mgrpo_is_refused_as_a_whole(run):
    edit_manifest(run, 2, lambda raw: raw.__setitem__("schema_version", 99))
    with pytest.raises(SchemaVersionError, match="Install a newer mgrpo"):
        verify_run(run)


def test_every_fault_of_several_is_told(run):
    place(run, layout.table_file("r", 0, "rewards")).unlink()
    place(run, layout.table_file("r", 2, "rewards")).unlink()
    place(run, f"{layout.policy_folder('r', 'sub', 2)}/tokenizer.json").unlink()
    assert faults(run) == [(0, "rewards.parquet"), (1, "policies/sub/2"), (2, "rewards.parquet")]
    assert verify_run(run).usable_through == -1


def test_a_version_that_is_missing_is_found_where_it_was_made_and_where_it_was_used(run):
    shutil.rmtree(place(run, layout.policy_folder("r", "sub", 2)))
    assert faults(run) == [(1, "policies/sub/2"), (2, "policies/sub/3")]
    assert all("version 2 of policy 'sub' is missing" in what for _, what in told(run))


def test_a_changed_file_of_a_policy_that_is_not_trained_is_found(tmp_path):
    files = StoreFiles(str(tmp_path / "store"))
    run = small_run.start_run(files, "r", tmp_path)
    zero = require_version(files, "r", "sub", "sub", 0)
    steps = {"sub": PolicyStep("sub", 0, 0, zero.sha256)}
    commit_manifest(files, small_run.manifest("r", 0, small_run.write_tables(files, "r", 0), steps))
    assert verify_run(run).sound
    place(run, f"{layout.policy_folder('r', 'sub', 0)}/tokenizer.json").write_text("[]")
    assert "tokenizer.json changed" in only_fault(run, 0, "policies/sub/0")
