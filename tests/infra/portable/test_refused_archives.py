"""An archive or folder that is not what its record says: refused, and nothing of it is visible in the store."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from infra.portable.exporting import export_stored
from infra.portable.importing import import_export
from infra.store.export_record import parse_record
from infra.store.files import StoreFiles
from infra.store.runs import run_names
from mgrpo_core.errors import SchemaVersionError, TableIntegrityError

REWARDS = "r/iterations/00000001/rewards.parquet"


def members(archive: Path) -> dict[str, bytes]:
    data = archive.read_bytes()
    if archive.suffix == ".zst":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as plain:
            data = plain.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if one.isreg()}


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The archive again, with other members; the record, first, is as it was unless `change` changes it."""
    found = members(archive)
    change(found)
    with tarfile.open(archive, "w") as tar:
        for name, data in found.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


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
