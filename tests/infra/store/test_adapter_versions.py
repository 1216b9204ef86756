"""A version that is an adapter: small, and good for nothing without the base that it names."""

import json
import shutil
from pathlib import Path

import pytest

from infra.store import layout
from infra.store.adapter_folder import is_adapter, whole_folder
from infra.store.files import StoreFiles
from infra.store.policies import (
    PolicyBase,
    PolicyVersion,
    fetch_version,
    find_sound_version,
    find_version,
    publish_version,
    version_faults,
)
from mgrpo_core.errors import SchemaVersionError, TableIntegrityError
from tests.infra.store.small_run import make_version

BASE_FILE = "r/policies/sub/00000000/model.safetensors"


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    return StoreFiles(str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}")


@pytest.fixture
def made(files: StoreFiles, tmp_path: Path) -> PolicyVersion:
    """Version 2, an adapter on version 0."""
    base = make_version(files, "r", "sub", 0, tmp_path, inputs="i")
    scratch = tmp_path / "adapter"
    scratch.mkdir()
    (scratch / "adapter_config.json").write_text("{}")
    (scratch / "adapter_model.safetensors").write_bytes(b"small")
    under = PolicyBase(base.version, base.sha256)
    return publish_version(files, "r", "sub", "sub", 2, scratch, parent_sha256="p", inputs_sha256="i2", base=under)


def test_it_comes_back_with_its_base_below_it(files, made, tmp_path):
    assert find_version(files, "r", "sub", "sub", 2) == made
    folder = fetch_version(files, made, tmp_path / "cache")
    assert is_adapter(folder)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"small"
    assert (whole_folder(folder) / "model.safetensors").read_bytes() == files.read(BASE_FILE)
    assert (whole_folder(folder) / "extra/template.jinja").exists()
    assert fetch_version(files, made, tmp_path / "cache") == folder


def test_its_files_in_the_store_are_its_own_alone(files, made):
    below = files.files_below(layout.policy_folder("r", "sub", 2))
    assert [path.rsplit("/", 1)[1] for path in below] == [
        "adapter_config.json", "adapter_model.safetensors", "version.json",
    ]  # fmt: skip


def test_whole_versions_are_recorded_as_before_there_were_adapters(files, made):
    whole, adapter = (json.loads(files.read(layout.version_file("r", "sub", number))) for number in (0, 2))
    assert whole["schema_version"] == 1
    assert "base" not in whole
    assert adapter["schema_version"] == 2, "a program that knows no adapters refuses it"
    assert adapter["base"] == {"version": 0, "sha256": made.base.sha256}


def test_a_base_that_changed_a_byte_is_told_of(files, made, tmp_path):
    data = files.read(BASE_FILE)
    files.write(BASE_FILE, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TableIntegrityError, match=r"sub/00000000/model\.safetensors"):
        fetch_version(files, made, tmp_path / "cache")


def test_a_base_that_was_replaced_is_told_of(files, made, tmp_path):
    shutil.rmtree(tmp_path / "sub-0-other", ignore_errors=True)
    make_version(files, "r", "sub", 0, tmp_path, inputs="other")
    for fault in (version_faults(files, made), [_error(files, made, tmp_path)]):
        assert "version 2 of policy 'sub' is an adapter on" in fault[0]
    assert find_sound_version(files, "r", "sub", "sub", 2) is None


def test_a_base_that_is_gone_is_told_of(files, made, tmp_path):
    files.remove(layout.version_file("r", "sub", 0))
    assert "version 0 of policy 'sub' is missing" in _error(files, made, tmp_path)


def test_a_record_of_a_newer_program_is_refused(files, made):
    path = layout.version_file("r", "sub", 2)
    files.write(path, files.read(path).replace(b'"schema_version": 2', b'"schema_version": 3'))
    with pytest.raises(SchemaVersionError, match="record version 3, this mgrpo reads up to 2"):
        find_version(files, "r", "sub", "sub", 2)


def _error(files: StoreFiles, made: PolicyVersion, tmp_path: Path) -> str:
    with pytest.raises(TableIntegrityError) as refused:
        fetch_version(files, made, tmp_path / "cache")
    return str(refused.value)
