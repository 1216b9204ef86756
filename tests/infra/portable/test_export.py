"""A run, or a part of it, in another place: every byte the same, verified before it is seen, and replayable."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.portable.exporting import export_stored
from infra.portable.importing import import_export
from infra.portable.jsonl import export_jsonl
from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, create_or_open_run, read_config, run_names
from infra.store.verify import verify_run
from mgrpo_core.errors import ConfigError, MGRPOError, RunConflictError, TableIntegrityError
from tests.infra.portable.conftest import content, verified
from tests.infra.store import small_run


@pytest.mark.parametrize("form", ["a.tar", "a.tar.zst", "folder"])
def test_a_whole_run_comes_back_with_every_byte_and_can_go_on(store, tmp_path, form):
    export_stored(str(store), "r", str(tmp_path / form))
    done = import_export(str(tmp_path / form), str(tmp_path / "there"))
    assert done.record.whole
    assert content(tmp_path / "there") == content(store)
    assert done.verification == verified(store)
    assert create_or_open_run(StoreFiles(str(tmp_path / "there")), "r", small_run.config()).name == "r"


def test_the_same_export_gives_the_same_bytes(store, tmp_path):
    for name in ("a.tar.zst", "b.tar.zst"):
        export_stored(str(store), "r", str(tmp_path / name))
    assert (tmp_path / "a.tar.zst").read_bytes() == (tmp_path / "b.tar.zst").read_bytes()


@pytest.mark.parametrize("form", ["a.tar", "folder"])
def test_a_part_verifies_as_a_part_with_the_missing_link_named(store, tmp_path, form):
    export_stored(str(store), "r", str(tmp_path / form), iterations=[2])
    import_export(str(tmp_path / form), str(tmp_path / "there"))
    found = verified(tmp_path / "there")
    assert found.sound
    assert (found.iterations, found.usable_through) == (1, 2)
    assert found.not_included == ("iteration 1, so the link of iteration 2 to it was not checked",)
    held = {path.name for path in (tmp_path / "there/r/iterations").iterdir()}
    versions = {path.name for path in (tmp_path / "there/r/policies/sub").iterdir()}
    assert (held, versions) == ({"00000002"}, {"00000002", "00000003"})


def test_a_folder_is_a_store_as_it_is(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "folder"), iterations=[1, 2])
    found = verified(tmp_path / "folder")
    assert found.sound
    assert found.not_included == ("iteration 0, so the link of iteration 1 to it was not checked",)


def test_links_between_iterations_of_a_part_are_checked(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "folder"), iterations=[1, 2])
    path = tmp_path / "folder/r/iterations/00000001/manifest.json"
    path.write_text(path.read_text().replace("2026-12-01", "2026-12-02"))
    found = verified(tmp_path / "folder")
    assert (2, "manifest.json") in [(fault.iteration, fault.where) for fault in found.faults]


def test_a_damaged_version_that_a_part_starts_from_is_found(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "folder"), iterations=[2])
    path = tmp_path / "folder/r/policies/sub/00000002/model.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    (fault,) = verified(tmp_path / "folder").faults
    assert fault.where == "policies/sub/00000002/model.safetensors"


def test_policies_can_be_left_out_and_are_named(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "a.tar"), policies=False)
    done = import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    assert not (tmp_path / "there/r/policies").exists()
    assert verified(tmp_path / "there").sound
    assert done.record.left_out() == ("the policy versions",)


def test_a_part_cannot_be_continued(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "a.tar"), iterations=[2])
    import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    with pytest.raises(RunConflictError, match=r"iterations 2\. It can be read and replayed, not continued"):
        create_or_open_run(StoreFiles(str(tmp_path / "there")), "r", small_run.config())


def test_a_part_of_a_part_can_be_exported_again(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "one"), iterations=[1, 2])
    export_stored(str(tmp_path / "one"), "r", str(tmp_path / "two"), iterations=[2])
    assert verified(tmp_path / "two").sound
    with pytest.raises(ConfigError, match=r"iteration 0 .* Committed: 1 to 2"):
        export_stored(str(tmp_path / "one"), "r", str(tmp_path / "three"), iterations=[0])


def test_a_store_that_has_the_run_is_left_as_it_is(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "a.tar"))
    shutil.copytree(store, tmp_path / "there")
    before = content(tmp_path / "there")
    with pytest.raises(RunConflictError, match="the store has a run of that name"):
        import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    assert content(tmp_path / "there") == before


@pytest.mark.parametrize("target", ["a.tar", "folder"])
def test_what_is_there_is_not_replaced(store, tmp_path, target):
    export_stored(str(store), "r", str(tmp_path / target), iterations=[1])
    with pytest.raises((ConfigError, RunConflictError), match="is not replaced"):
        export_stored(str(store), "r", str(tmp_path / target), iterations=[2])


def test_a_damaged_run_is_not_exported(store, tmp_path):
    shutil.copytree(store, tmp_path / "damaged")
    path = tmp_path / "damaged/r/iterations/00000001/rewards.parquet"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(TableIntegrityError, match=r"rewards\.parquet: sha256"):
        export_stored(str(tmp_path / "damaged"), "r", str(tmp_path / "a.tar"))
    assert not (tmp_path / "a.tar").exists()


class Interrupted(BaseException):
    """As Ctrl-C is."""


@pytest.mark.parametrize("after", [1, 30])
def test_an_import_that_was_interrupted_shows_nothing_and_is_completed_by_the_same_call(
    store, tmp_path, monkeypatch, after
):
    export_stored(str(store), "r", str(tmp_path / "a.tar"))
    calls = iter(range(10**6))
    original = StoreFiles.writing

    def interrupted(self: StoreFiles, path: str) -> Any:
        if next(calls) == after:
            raise Interrupted
        return original(self, path)

    monkeypatch.setattr(StoreFiles, "writing", interrupted)
    with pytest.raises(Interrupted):
        import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    monkeypatch.undo()
    assert run_names(StoreFiles(str(tmp_path / "there"))) == []
    import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    assert content(tmp_path / "there") == content(store)


@pytest.mark.parametrize("after", [1, 20])
def test_an_export_to_a_folder_that_was_interrupted_is_no_run_and_is_completed_by_the_same_call(
    store, tmp_path, monkeypatch, after
):
    calls = iter(range(10**6))
    original = StoreFiles.writing

    def interrupted(self: StoreFiles, path: str) -> Any:
        if next(calls) == after:
            raise Interrupted
        return original(self, path)

    monkeypatch.setattr(StoreFiles, "writing", interrupted)
    with pytest.raises(Interrupted):
        export_stored(str(store), "r", str(tmp_path / "folder"))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="expected one export there, found none"):
        import_export(str(tmp_path / "folder"), str(tmp_path / "there"))
    export_stored(str(store), "r", str(tmp_path / "folder"))
    assert verified(tmp_path / "folder").sound


@pytest.mark.parametrize("form", ["a.tar.zst", "folder"])
def test_both_ways_through_object_storage(store, tmp_path, s3_url, form):
    export_stored(str(store), "r", f"{s3_url}/{form}", iterations=[0])
    done = import_export(f"{s3_url}/{form}", f"{s3_url}/there")
    assert done.record.whole
    remote = StoreFiles(f"{s3_url}/there")
    assert verify_run(StoredRun(remote, "r")).sound
    original = content(store)
    assert remote.files_below("") == sorted(ref.path for ref in done.record.files.values())
    assert all(remote.read(path) == original[path] for path in remote.files_below(""))
    with pytest.raises(RunConflictError):
        import_export(f"{s3_url}/{form}", f"{s3_url}/there")


def test_a_part_of_a_run_on_object_storage_comes_home(store, tmp_path, s3_url):
    export_stored(str(store), "r", f"{s3_url}/runs", iterations=[1, 2], policies=False)
    export_stored(f"{s3_url}/runs", "r", str(tmp_path / "a.tar"), iterations=[2], policies=False)
    import_export(str(tmp_path / "a.tar"), str(tmp_path / "there"))
    assert verified(tmp_path / "there").sound


def test_several_exports_in_a_folder_are_asked_for_by_name(store, tmp_path):
    small_run.write_run(StoreFiles(str(tmp_path / "other")), "q", tmp_path, 1)
    export_stored(str(store), "r", str(tmp_path / "folder"))
    export_stored(str(tmp_path / "other"), "q", str(tmp_path / "folder"))
    with pytest.raises(ConfigError, match=r"several: q, r\. Name one with --run"):
        import_export(str(tmp_path / "folder"), str(tmp_path / "there"))
    assert import_export(str(tmp_path / "folder"), str(tmp_path / "there"), run="q").record.run == "q"


def test_no_secret_is_exported(tmp_path):
    """A config that was stored by other means, with a credential in it: its run stays where it is."""
    files = StoreFiles(str(tmp_path / "store"))
    run = small_run.write_run(files, "r", tmp_path, 1)
    sha256 = config_sha256(run)
    raw = json.loads(files.read(layout.config_file("r", sha256)))
    raw["tracking"]["mlflow_uri"] = "https://user:hunter2@tracker/"
    data = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    name = hashlib.sha256(data).hexdigest()
    files.write(layout.config_file("r", name), data)
    manifest = Path(files.full(layout.manifest_file("r", 0)))
    manifest.write_text(manifest.read_text().replace(sha256, name))
    with pytest.raises(ConfigError) as caught:
        export_stored(str(tmp_path / "store"), "r", str(tmp_path / "a.tar"))
    assert "this mgrpo refuses the config" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(MGRPOError) as refused:
        export_jsonl(str(tmp_path / "store"), "r", str(tmp_path / "a.jsonl"))
    assert "hunter2" not in str(refused.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("a.")]


def config_sha256(run: StoredRun) -> str:
    (config,) = Path(run.files.full(layout.configs_folder("r"))).iterdir()
    sha256 = config.stem
    assert read_config(run, sha256) == small_run.config()
    return sha256
