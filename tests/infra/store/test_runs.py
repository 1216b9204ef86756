import json

import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.manifests import newest_committed, read_manifest
from infra.store.policies import find_version
from infra.store.runs import (
    create_or_open_run,
    find_run,
    newest_config,
    policy_versions,
    read_config,
    require_run,
    resume_point,
    run_names,
)
from infra.store.verify import verify_run
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import (
    ConfigError,
    RunConflictError,
    SchemaVersionError,
    StoreError,
    StoreNotWritableError,
    TableIntegrityError,
)
from tests.infra.store.small_run import config, make_version, start_run, write_iteration, write_run, write_tables


def test_runs_are_listed_by_name_and_names_stay_text(files):  # case E8
    for name in ("042", "007", "1e5"):
        create_or_open_run(files, name, config())
    files.write("not-a-run/data.parquet", b"")
    files.write("not a run name/run.json", b"{}")
    assert run_names(files) == ["007", "042", "1e5"]
    assert find_run(files, "7") is None
    with pytest.raises(StoreError, match=r"no run '7'\. Runs there: 007, 042, 1e5"):
        require_run(files, "7")


@pytest.mark.parametrize("name", ["../x", "sub/search", "é", ""])
def test_a_run_name_that_is_no_folder_name_is_refused_before_anything_is_written(files, name):  # case E10
    with pytest.raises(ConfigError):
        create_or_open_run(files, name, config())
    assert files.files_below("") == []


def test_every_config_a_run_has_used_is_kept(files):
    create_or_open_run(files, "r", config(iterations=1))
    create_or_open_run(files, "r", config(iterations=1))
    run = create_or_open_run(files, "r", config(iterations=5))  # iterations decide no weights
    names = files.names(layout.configs_folder("r"))
    assert len(names) == 2
    kept = [read_config(run, name.removesuffix(".json")) for name in names]
    assert sorted(one.iterations for one in kept) == [1, 5]
    assert newest_config(run).iterations == 1


def test_another_config_under_the_same_name_is_a_conflict_unless_it_is_accepted(files):
    create_or_open_run(files, "r", config(seed=1))
    with pytest.raises(RunConflictError, match=r"run 'r' .* in use with another config.*--accept-config-change"):
        create_or_open_run(files, "r", config(seed=2))
    assert len(files.names(layout.configs_folder("r"))) == 1
    create_or_open_run(files, "r", config(seed=2), accept_config_change=True)
    assert len(files.names(layout.configs_folder("r"))) == 2


def test_a_store_that_cannot_be_written_is_said_before_work_starts(tmp_path):
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreNotWritableError, match="--store"):
        create_or_open_run(StoreFiles(str(tmp_path / "store")), "r", config())


def test_a_config_that_was_edited_afterwards_is_refused(local_files):
    run = create_or_open_run(local_files, "r", config())
    (name,) = local_files.names(layout.configs_folder("r"))
    local_files.write(f"{layout.configs_folder('r')}/{name}", config(seed=9).canonical_json().encode())
    with pytest.raises(TableIntegrityError, match="content differs from its name"):
        newest_config(run)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (b"{", TableIntegrityError, "is no run record"),
        (b"[]", TableIntegrityError, "is no run record"),
        (b'{"schema_version": 1}', TableIntegrityError, "is no run record"),
        (b'{"schema_version": 9, "later": 1}', SchemaVersionError, "Install a newer mgrpo"),
    ],
)
def test_a_run_record_that_cannot_be_read_is_named(local_files, content, error, said):
    create_or_open_run(local_files, "r", config())
    local_files.write(layout.run_file("r"), content)
    with pytest.raises(error, match=said):
        create_or_open_run(local_files, "r", config())


def test_a_run_folder_that_was_renamed_is_noticed(local_files):
    create_or_open_run(local_files, "r", config())
    local_files.write(layout.run_file("s"), local_files.read(layout.run_file("r")))
    with pytest.raises(TableIntegrityError, match="is of run 'r'"):
        create_or_open_run(local_files, "s", config())


def test_a_new_run_starts_at_iteration_zero_with_version_zero(files, tmp_path):
    run = start_run(files, "r", tmp_path)
    resume = resume_point(run)
    assert (resume.iteration, resume.newest, resume.warnings) == (0, None, ())
    assert policy_versions(config(), None) == {"main": 0, "sub": 0}


def test_a_run_continues_after_its_newest_iteration_with_its_cursor_and_versions(files, tmp_path):  # case H1
    resume = resume_point(write_run(files, "r", tmp_path, 2))
    assert (resume.iteration, resume.warnings) == (2, ())
    assert resume.newest == read_manifest(files, "r", 1)
    assert resume.newest.manifest.cursor == DataCursor(0, 4)
    assert policy_versions(config(), resume.newest) == {"main": 2, "sub": 2}


def test_an_iteration_that_was_under_way_changes_nothing(files, tmp_path):  # cases H5, H6
    run = write_run(files, "r", tmp_path, 2)
    write_tables(files, "r", 2)
    make_version(files, "r", "main", 3, tmp_path, inputs="iteration 2")  # main is saved, sub is not
    before = files.files_below("r")
    resume = resume_point(run)
    assert (resume.iteration, resume.warnings) == (2, ())
    assert policy_versions(config(), resume.newest) == {"main": 2, "sub": 2}
    assert files.files_below("r") == before


def test_a_damaged_policy_version_on_an_object_store_is_set_aside_with_its_iteration(each_s3_url, tmp_path):  # case H5
    files = StoreFiles(each_s3_url)
    run = write_run(files, "r", tmp_path, 1)
    files.write(f"{layout.policy_folder('r', 'sub', 1)}/model.safetensors", b"half")
    resume = resume_point(run)
    assert (resume.iteration, resume.newest) == (0, None)
    assert files.exists("r/aside/0000-r_iterations_00000000/manifest.json")
    assert files.exists("r/aside/0001-r_policies_sub_00000001/version.json")
    assert not files.exists(layout.iteration_folder("r", 0))


@pytest.mark.parametrize("damage", ["cut off", "missing file", "missing record", "missing folder"])
def test_a_damaged_policy_version_is_set_aside_with_its_iteration(near_files, tmp_path, damage):  # cases H5, H6
    files = near_files
    run = write_run(files, "r", tmp_path, 3)
    folder = layout.policy_folder("r", "sub", 3)
    if damage == "cut off":
        files.write(f"{folder}/model.safetensors", b"half")
    elif damage == "missing file":
        files.remove(f"{folder}/model.safetensors")
    elif damage == "missing record":
        files.remove(layout.version_file("r", "sub", 3))
    else:
        files.remove_folder(folder)
    resume = resume_point(run)
    assert resume.iteration == 2
    assert policy_versions(config(), resume.newest) == {"main": 2, "sub": 2}
    (warning,) = resume.warnings
    assert "iteration 2 is damaged and was moved to" in warning
    assert "sub/00000003" in warning
    assert newest_committed(files, "r") == 1
    assert files.exists("r/aside/0000-r_iterations_00000002/manifest.json"), "set aside, not deleted"
    assert find_version(files, "r", "sub", "sub", 3) is None
    assert resume_point(run).warnings == ()
    write_iteration(files, "r", 2, tmp_path, resume.newest)
    assert resume_point(run).iteration == 3


def test_a_manifest_that_cannot_be_read_is_set_aside(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 2)
    path = local_files.local(layout.manifest_file("r", 1))
    path.write_bytes(path.read_bytes()[:100])
    resume = resume_point(run)
    assert resume.iteration == 1
    assert "is no manifest" in resume.warnings[0]


def test_iterations_behind_a_missing_one_are_set_aside(near_files, tmp_path):
    files = near_files
    run = write_run(files, "r", tmp_path, 4)
    files.remove_folder(layout.iteration_folder("r", 1))
    resume = resume_point(run)
    assert resume.iteration == 1
    assert len(resume.warnings) == 2
    assert all("iteration 1 is missing" in warning for warning in resume.warnings)
    assert len(files.names(layout.aside_folder("r"))) == 2
    assert files.names(layout.iterations_folder("r")) == ["00000000"]


def test_a_run_whose_newest_iteration_is_whole_continues_whatever_is_missing_before(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 4)
    local_files.remove_folder(layout.iteration_folder("r", 2))  # the search meets 0, 1, 3
    resume = resume_point(run)
    assert (resume.iteration, resume.warnings) == (4, ())
    assert [fault.iteration for fault in verify_run(run).faults] == [2]


def test_damage_to_version_zero_moves_nothing(local_files, tmp_path):
    run = start_run(local_files, "r", tmp_path)
    committed = write_iteration(local_files, "r", 0, tmp_path)
    # A policy that is not trained keeps version 0.
    raw = json.loads(committed.manifest.to_bytes())
    zero = find_version(local_files, "r", "sub", "sub", 0)
    raw["policies"]["sub"] |= {"to_version": 0, "sha256": zero.sha256}
    local_files.local(layout.manifest_file("r", 0)).write_text(json.dumps(raw))
    assert resume_point(run).iteration == 1
    local_files.write(f"{layout.policy_folder('r', 'sub', 0)}/model.safetensors", b"half")
    with pytest.raises(TableIntegrityError, match=r"version 0 of policy 'sub' is damaged.*Nothing was changed"):
        resume_point(run)
    assert newest_committed(local_files, "r") == 0


def test_an_iteration_of_a_newer_mgrpo_is_never_set_aside(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 2)
    path = local_files.local(layout.manifest_file("r", 1))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(SchemaVersionError):
        resume_point(run)
    assert newest_committed(local_files, "r") == 1


def test_staging_that_a_kill_after_the_commit_left_is_cleared(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 1)
    place = local_files.local(layout.staged_group("r", 0, 0))
    place.parent.mkdir(parents=True)
    place.write_bytes(b"left over")
    resume_point(run)
    assert not local_files.exists(layout.staging_folder("r", 0))


def test_the_same_damage_twice_keeps_both_copies(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 1)
    for _ in range(2):
        local_files.local(layout.manifest_file("r", 0)).write_bytes(b"")
        assert resume_point(run).iteration == 0
        write_iteration(local_files, "r", 0, tmp_path)
    asides = [name for name in local_files.names(layout.aside_folder("r")) if "iterations" in name]
    assert len(asides) == 2


def test_an_iteration_that_lost_its_manifest_stays_where_it_is_and_those_behind_it_go(local_files, tmp_path):
    run = write_run(local_files, "r", tmp_path, 4)
    local_files.remove(layout.manifest_file("r", 1))
    assert resume_point(run).iteration == 1
    assert local_files.names(layout.iterations_folder("r")) == ["00000000", "00000001"]
    assert local_files.exists(layout.table_file("r", 1, "rewards"))


def test_a_sound_run_is_continued_without_listing_its_iterations(local_files, tmp_path, monkeypatch):
    run = write_run(local_files, "r", tmp_path, 3)
    listed = []
    monkeypatch.setattr(local_files, "names", lambda folder: listed.append(folder) or [])
    assert resume_point(run).iteration == 3
    assert layout.iterations_folder("r") not in listed
