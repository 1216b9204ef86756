import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.store import layout, policies
from infra.store.files import StoreFiles
from infra.store.policies import fetch_version, find_version, publish_version, require_version, version_faults
from mgrpo_core.errors import AlreadyCommittedError, SchemaVersionError, TableIntegrityError
from tests.infra.store.small_run import make_version


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_version_comes_back_byte_for_byte_with_its_folders(files, tmp_path):
    made = make_version(files, "r", "sub", 13, tmp_path, inputs="i")
    assert find_version(files, "r", "sub", "sub", 13) == made
    assert files.files_below("r/policies") == [
        f"r/policies/sub/00000013/{name}"
        for name in ("extra/template.jinja", "model.safetensors", "tokenizer.json", "version.json")
    ]
    local = fetch_version(files, made, tmp_path / "cache")
    found = bytes_below(local)
    found.pop("version.json", None)  # beside the files on a local store
    assert found == bytes_below(tmp_path / "sub-13-i")


def test_a_version_on_a_local_disk_is_used_where_it_lies(local_files, tmp_path):
    made = make_version(local_files, "r", "sub", 1, tmp_path, inputs="i")
    assert fetch_version(local_files, made, tmp_path / "cache") == Path(local_files.full("r/policies/sub/00000001"))
    assert not (tmp_path / "cache").exists()


def test_a_version_without_its_record_does_not_exist(files, tmp_path):  # case H5
    make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    files.remove(layout.version_file("r", "sub", 1))
    assert find_version(files, "r", "sub", "sub", 1) is None
    with pytest.raises(TableIntegrityError, match="version 1 of policy 'sub' is missing or incomplete"):
        require_version(files, "r", "sub", "sub", 1)


def test_the_same_inputs_give_the_version_that_is_there(files, tmp_path):
    first = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"a second optimiser step")
    again = publish_version(files, "r", "sub", "sub", 1, tmp_path / "other", parent_sha256=None, inputs_sha256="i")
    assert again == first
    assert not version_faults(files, again)


def test_a_version_of_other_inputs_is_set_aside_not_deleted(files, tmp_path):
    make_version(files, "r", "sub", 1, tmp_path, inputs="of an iteration that was never committed")
    old = files.read("r/policies/sub/00000001/model.safetensors")
    made = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    assert find_version(files, "r", "sub", "sub", 1) == made
    assert files.read("r/policies/sub/00000001/model.safetensors") != old
    assert files.read("r/aside/0000-r_policies_sub_00000001/model.safetensors") == old
    assert files.exists("r/aside/0000-r_policies_sub_00000001/version.json")


def test_a_damaged_version_of_the_same_inputs_is_made_again(files, tmp_path):  # case H5
    first = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    files.write("r/policies/sub/00000001/model.safetensors", b"cut off")
    again = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    assert again == first
    assert not version_faults(files, again)
    assert files.read("r/aside/0000-r_policies_sub_00000001/model.safetensors") == b"cut off"


def test_what_a_killed_upload_left_is_set_aside(files, tmp_path):  # case H5
    files.write("r/policies/sub/00000001/model.safetensors", b"half")
    files.write("r/policies/sub/00000001/optimizer.safetensors", b"of another attempt")
    made = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    assert not files.exists("r/policies/sub/00000001/optimizer.safetensors")
    assert not version_faults(files, made)


KILLED = """
import sys, time
from pathlib import Path
from infra.store.files import StoreFiles
from infra.store.policies import publish_version

class Halted(StoreFiles):
    def create(self, path, data):
        print("uploaded", flush=True)
        time.sleep(600)

publish_version(
    Halted(sys.argv[1]), "r", "sub", "sub", 1, Path(sys.argv[2]), parent_sha256=None, inputs_sha256="i"
)
"""


def test_a_kill_before_the_record_leaves_no_version(local_files, tmp_path):  # case H5
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "model.safetensors").write_bytes(b"weights")
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, local_files.url, str(scratch)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "uploaded\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert local_files.exists("r/policies/sub/00000001/model.safetensors")
    assert find_version(local_files, "r", "sub", "sub", 1) is None
    made = publish_version(local_files, "r", "sub", "sub", 1, scratch, parent_sha256=None, inputs_sha256="i")
    assert find_version(local_files, "r", "sub", "sub", 1) == made


class Overtaken(StoreFiles):
    """Another process finishes the version between this one's upload and its record."""

    winner_inputs = ""
    scratch = Path()

    def create(self, path, data):
        if self.winner_inputs:
            inputs, self.winner_inputs = self.winner_inputs, ""
            make_version(StoreFiles(self.url), "r", "sub", 1, self.scratch, inputs=inputs)
        return super().create(path, data)


@pytest.mark.parametrize("inputs", ["i", "others"])
def test_a_publication_that_was_overtaken_takes_the_winners_version_or_stops(tmp_path, inputs):
    files = Overtaken(str(tmp_path / "store"))
    files.winner_inputs, files.scratch = inputs, tmp_path
    if inputs == "i":
        assert make_version(files, "r", "sub", 1, tmp_path, inputs="i").inputs_sha256 == "i"
    else:
        with pytest.raises(AlreadyCommittedError, match="from other inputs"):
            make_version(files, "r", "sub", 1, tmp_path, inputs="i")
        assert find_version(files, "r", "sub", "sub", 1).inputs_sha256 == "others"


@pytest.mark.parametrize("damage", ["changed byte", "missing", "cut off", "swapped"])
def test_a_file_that_differs_from_the_record_is_never_handed_out(near_files, tmp_path, damage):
    files = near_files
    made = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    path = "r/policies/sub/00000001/model.safetensors"
    data = files.read(path)
    if damage == "missing":
        files.remove(path)
    elif damage == "changed byte":
        files.write(path, data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut off":
        files.write(path, data[:1000])
    else:
        files.write(path, files.read("r/policies/sub/00000001/tokenizer.json"))
    assert len(version_faults(files, made)) == 1
    with pytest.raises(TableIntegrityError, match=r"model\.safetensors"):
        fetch_version(files, made, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_downloaded_version_is_downloaded_once(each_s3_url, tmp_path):
    files = StoreFiles(each_s3_url)
    made = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    first = fetch_version(files, made, tmp_path / "cache")
    files.remove("r/policies/sub/00000001/model.safetensors")
    assert fetch_version(files, made, tmp_path / "cache") == first


def test_ranks_of_one_machine_may_download_at_the_same_time(each_s3_url, tmp_path):
    files = StoreFiles(each_s3_url)
    made = make_version(files, "r", "sub", 1, tmp_path, inputs="i")
    with ThreadPoolExecutor(8) as ranks:
        folders = list(ranks.map(lambda _: fetch_version(files, made, tmp_path / "cache"), range(8)))
    assert len(set(folders)) == 1
    assert len(list((tmp_path / "cache" / "sub").iterdir())) == 1
    assert (folders[0] / "model.safetensors").stat().st_size == 2000


def test_an_empty_folder_is_no_version(files, tmp_path):
    with pytest.raises(TableIntegrityError, match="holds no file"):
        publish_version(files, "r", "sub", "sub", 1, tmp_path, parent_sha256=None, inputs_sha256="i")
    assert find_version(files, "r", "sub", "sub", 1) is None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"version": 2}, TableIntegrityError, "is version 2 of policy 'sub', expected version 1"),
        ({"policy": "main"}, TableIntegrityError, "of policy 'main'"),
        ({"schema_version": policies.VERSION_SCHEMA + 1}, SchemaVersionError, "Install a newer mgrpo"),
        ({"files": {"../../x": {"path": "r/x", "sha256": "", "bytes": 0}}}, TableIntegrityError, "outside its folder"),
        ({"files": {"x": {"path": "other/x", "sha256": "", "bytes": 0}}}, TableIntegrityError, "outside its folder"),
        ({"files": 3}, TableIntegrityError, "is no version record"),
    ],
)
def test_a_record_that_says_something_else_is_refused(local_files, tmp_path, change, error, said):
    make_version(local_files, "r", "sub", 1, tmp_path, inputs="i")
    path = layout.version_file("r", "sub", 1)
    record = json.loads(local_files.read(path)) | change
    local_files.write(path, json.dumps(record).encode())
    with pytest.raises(error, match=said):
        find_version(local_files, "r", "sub", "sub", 1)
