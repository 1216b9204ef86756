"""A run, or a part of it, in another place: every byte the same, verified before it is seen, and replayable."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infra.portable.exporting import export_stored
from infra.portable.importing import import_export
from infra.portable.jsonl import export_jsonl
from infra.store import layout
from infra.store.export_record import parse_record
from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, create_or_open_run, read_config, run_names
from infra.store.verify import verify_run
from mgrpo_core.errors import ConfigError, MGRPOError, RunConflictError, SchemaVersionError, TableIntegrityError
from tests.infra.store import small_run

ITERATIONS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations. Nobody may change it."""
    folder = tmp_path_factory.mktemp("export")
    small_run.write_run(StoreFiles(str(folder / "store")), "r", folder, ITERATIONS)
    return folder / "store"


def content(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def verified(store: Path) -> Any:
    return verify_run(StoredRun(StoreFiles(str(store)), "r"))


def members(archive: Path) -> dict[str, bytes]:
    data = archive.read_bytes()
    if archive.suffix == ".zst":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as plain:
            data = plain.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if one.isreg()}


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


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The archive again, with other members; the record, first, is as it was unless `change` changes it."""
    found = members(archive)
    change(found)
    with tarfile.open(archive, "w") as tar:
        for name, data in found.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


REWARDS = "r/iterations/00000001/rewards.parquet"


def flip(found: dict[str, bytes]) -> None:
    found[REWARDS] = bytes([found[REWARDS][0] ^ 1]) + found[REWARDS][1:]


def lengthen(found: dict[str, bytes]) -> None:
    found[REWARDS] += b"more"


def leave_out(found: dict[str, bytes]) -> None:
    del found[REWARDS]


def add(found: dict[str, bytes]) -> None:
    found["r/iterations/00000001/extra.parquet"] = b""


def climb(found: dict[str, bytes]) -> None:
    found["../outside"] = b"x"


def reseal(found: dict[str, bytes], name: str, data: bytes) -> None:
    """Another content that the record agrees with: only manifest and chain can tell."""
    found[f"r/{name}"] = data
    raw = json.loads(found["r/export.json"])
    raw["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    found["r/export.json"] = json.dumps(raw).encode()


def change_table_and_record(found: dict[str, bytes]) -> None:
    reseal(found, REWARDS.removeprefix("r/"), found[REWARDS][::-1])


def change_manifest_and_record(found: dict[str, bytes]) -> None:
    name = "iterations/00000001/manifest.json"
    reseal(found, name, found[f"r/{name}"].replace(b"2026-12-01", b"2026-12-02"))


def claim_fewer_iterations(found: dict[str, bytes]) -> None:
    raw = json.loads(found["r/export.json"])
    raw["iterations"] = [0, 1]
    found["r/export.json"] = json.dumps(raw).encode()


def name_a_file_outside(found: dict[str, bytes]) -> None:
    raw = json.loads(found["r/export.json"])
    raw["files"]["iterations/../../outside"] = {"sha256": "0" * 64, "bytes": 1}
    found["r/export.json"] = json.dumps(raw).encode()


def name_a_run_outside(found: dict[str, bytes]) -> None:
    found["r/export.json"] = found["r/export.json"].replace(b'"run": "r"', b'"run": "../r"')


def no_record_first(found: dict[str, bytes]) -> None:
    found["r/export.json"] = found.pop("r/export.json")


def claim_endless_bytes(found: dict[str, bytes]) -> None:
    raw = json.loads(found["r/export.json"])
    raw["files"][REWARDS.removeprefix("r/")]["bytes"] = 1 << 50
    found["r/export.json"] = json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip, r"rewards\.parquet: sha256"),
        (lengthen, r"rewards\.parquet is a file of \d+ bytes"),
        (leave_out, r"without 1 files, the first iterations/00000001/rewards\.parquet"),
        (add, r"extra\.parquet', which its record does not name"),
        (climb, r"holds '\.\./outside', which its record does not name"),
        (change_table_and_record, r"changed after it was committed"),
        (change_manifest_and_record, r"iteration 2, manifest\.json: its parent is"),
        (claim_fewer_iterations, r"it holds 3 iterations, its record says 2"),
        (name_a_file_outside, r"is no name of a run's file"),
        (name_a_run_outside, r"is no export"),
        (no_record_first, r"does not begin with the record"),
        (claim_endless_bytes, r"No export does that"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_archive_that_is_not_what_it_says_leaves_the_store_as_it_was(store, tmp_path, change, words):
    archive = tmp_path / "a.tar"
    export_stored(str(store), "r", str(archive))
    rewritten(archive, change)
    with pytest.raises(TableIntegrityError, match=words):
        import_export(str(archive), str(tmp_path / "there"))
    assert run_names(StoreFiles(str(tmp_path / "there"))) == []
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "there" / "r").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_link_or_device_in_an_archive_is_refused(store, tmp_path, kind):
    archive = tmp_path / "a.tar"
    export_stored(str(store), "r", str(archive))
    found = members(archive)
    with tarfile.open(archive, "w") as tar:
        for name, data in found.items():
            member = tarfile.TarInfo(name)
            if name == REWARDS:
                member.type, member.linkname = kind, "/etc/passwd"
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with pytest.raises(TableIntegrityError, match=r"or none at all"):
        import_export(str(archive), str(tmp_path / "there"))


@pytest.mark.parametrize("form", ["a.tar", "a.tar.zst"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_half_an_archive_is_refused(store, tmp_path, form, share):
    archive = tmp_path / form
    export_stored(str(store), "r", str(archive))
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TableIntegrityError, match=r"it again|does not begin"):
        import_export(str(archive), str(tmp_path / "there"))
    assert run_names(StoreFiles(str(tmp_path / "there"))) == []


def test_a_header_that_expands_without_end_is_stopped(tmp_path):
    """A record of half a gigabyte of blanks in a few kilobytes: the reader stops at what a record may be."""
    archive = tmp_path / "a.tar.zst"
    with pa.CompressedOutputStream(str(archive), "zstd") as out:
        member = tarfile.TarInfo("r/export.json")
        member.size = 512 << 20
        out.write(member.tobuf())
        for _ in range(512):
            out.write(bytes(1 << 20))
    assert archive.stat().st_size < 1 << 20
    with pytest.raises(TableIntegrityError, match="more bytes than its record says"):
        import_export(str(archive), str(tmp_path / "there"))


def test_a_link_in_a_folder_is_refused(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "folder"))
    path = tmp_path / "folder" / REWARDS
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TableIntegrityError, match="is a link"):
        import_export(str(tmp_path / "folder"), str(tmp_path / "there"))


def test_a_folder_through_a_link_is_still_a_folder(store, tmp_path):
    export_stored(str(store), "r", str(tmp_path / "folder"))
    (tmp_path / "short").symlink_to(tmp_path / "folder")
    assert import_export(str(tmp_path / "short"), str(tmp_path / "there")).record.whole


def test_an_export_of_a_newer_mgrpo_is_refused():
    with pytest.raises(SchemaVersionError, match="Install a newer mgrpo"):
        parse_record(b'{"schema_version": 99}', "a.tar")


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


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_plain_text_has_a_line_a_trajectory_with_its_reward_and_advantage(store, tmp_path):
    assert export_jsonl(str(store), "r", str(tmp_path / "a.jsonl")) == ITERATIONS * 10
    lines = lines_of(tmp_path / "a.jsonl")
    assert len(lines) == ITERATIONS * 10  # 2 queries x (2 main + 1 + 2 calls)
    first = lines[0]
    assert (first["agent"], first["iteration"], first["question"], first["answers"]) == (
        "main",
        0,
        "What is it?",
        ["42"],
    )
    assert first["messages"] == [
        {"role": "user", "content": "What is it?", "name": None},
        {"role": "assistant", "content": "42", "name": None},
    ]
    assert first["reward"]["format"] == {"value": 1.0, "weight": 0.1}
    assert first["reward"]["expert"] == {"value": None, "weight": None}
    for line in lines:
        assert line["advantage"]["value"] == 2 * line["reward"]["total"] - 1
        assert "token_ids" not in line


def test_plain_text_has_tokens_where_they_are_asked_for_and_null_where_there_is_no_number(store, tmp_path):
    export_jsonl(str(store), "r", str(tmp_path / "a.jsonl"), iterations=[1], tokens=True)
    lines = lines_of(tmp_path / "a.jsonl")
    assert {line["iteration"] for line in lines} == {1}
    for line in lines:
        assert len(line["token_ids"]) == len(line["loss_mask"]) == len(line["logprobs"]) == 8
        assert [one is None for one in line["logprobs"]] == [not sampled for sampled in line["loss_mask"]]


def test_plain_text_is_not_replaced_either(store, tmp_path):
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_jsonl(str(store), "r", str(tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_text() == "mine"


def test_plain_text_goes_to_object_storage(store, s3_url):
    export_jsonl(str(store), "r", f"{s3_url}/a.jsonl", iterations=[0])
    assert len(StoreFiles(s3_url).read("a.jsonl").splitlines()) == 10
