"""Commits, large files, folders and secrets on S3 servers."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import boto3
import pytest

import infra.store.files
import infra.store.s3
from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.manifests import newest_committed, read_manifest
from infra.store.runs import open_store, resume_point
from infra.store.schemas import REWARDS
from infra.store.staging import clear_staging
from infra.store.tables import read_table
from infra.store.verify import verify_run
from mgrpo_core.errors import StoreError
from tests.infra.store import small_run
from tests.servers.s3_proxy import Fault, s3_proxy

RACER = """
import sys, time
from pathlib import Path
from infra.store.files import StoreFiles
from infra.store.manifests import Manifest, commit_manifest
from infra.store.writer import new_writer
from mgrpo_core.data_order import DataCursor
from mgrpo_core.errors import AlreadyCommittedError
files, name, racers, track = StoreFiles(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
for number in range(50):
    # Side by side at every start, or on a busy machine the first one off would win them all.
    (track / f"{number}-{name}").touch()
    while len(list(track.glob(f"{number}-*"))) < racers:
        time.sleep(0.001)
    # All of them equal but for the writer.
    manifest = Manifest(f"run{number}", 0, "c", "l", "0", None, {}, {}, DataCursor(), "now", new_writer(name))
    try:
        commit_manifest(files, manifest)
        print(number, "won", manifest.writer, sep="|", flush=True)
    except AlreadyCommittedError as error:
        print(number, "lost", error, sep="|", flush=True)
"""


def test_of_eight_writers_that_race_for_fifty_manifests_one_wins_each_and_the_others_learn_who(seaweedfs_url, tmp_path):
    command = [sys.executable, "-c", RACER, seaweedfs_url]
    racers = [
        subprocess.Popen([*command, f"racer{number}", "8", str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for number in range(8)
    ]
    lines = [line.split("|", 2) for racer in racers for line in racer.communicate(timeout=120)[0].splitlines()]
    assert len(lines) == 400
    winner = {int(number): what for number, end, what in lines if end == "won"}
    assert len(winner) == len([1 for _, end, _ in lines if end == "won"]) == 50
    for number, end, said in lines:
        if end == "lost":
            assert f"is committed already, by {winner[int(number)]}. Theirs stands" in said
    files = StoreFiles(seaweedfs_url)
    assert {number: read_manifest(files, f"run{number}", 0).manifest.writer for number in range(50)} == winner
    assert len({writer.split(" ")[0] for writer in winner.values()}) > 1, "there was a race"


HALTED = """
import sys, time
from pathlib import Path
from infra.store.files import StoreFiles
from tests.infra.store import small_run

class Halted(StoreFiles):
    def create(self, path, data):
        if path.endswith("manifest.json"):
            print("uploaded", flush=True)
            time.sleep(600)
        return super().create(path, data)

small_run.write_run(Halted(sys.argv[1]), "r", Path(sys.argv[2]), 1)
"""


def test_a_kill_between_upload_and_manifest_shows_the_reader_no_iteration(each_s3_url, tmp_path):  # cases E11, H5
    child = subprocess.Popen(
        [sys.executable, "-c", HALTED, each_s3_url, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "uploaded\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    files = StoreFiles(each_s3_url)
    assert newest_committed(files, "r") == -1
    assert files.holds(layout.table_file("r", 0, "rewards")), "all but the manifest is there"
    run = small_run.start_run(files, "r", tmp_path)
    assert resume_point(run).iteration == 0
    small_run.write_iteration(files, "r", 0, tmp_path)
    assert verify_run(run).sound


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(infra.store.s3, "PART_BYTES", 5 << 20)  # the least that S3 allows


@pytest.fixture(params=["moto_endpoint", "seaweedfs_endpoint"], ids=["moto", "seaweedfs"])
def proxy(request, monkeypatch):
    with s3_proxy(request.getfixturevalue(request.param)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def url() -> str:
    return f"s3://store/{uuid.uuid4().hex}"


def test_a_large_file_goes_up_in_parts_and_comes_back_whole(proxy, small_parts, tmp_path):
    files, source = StoreFiles(url()), tmp_path / "weights"
    source.write_bytes(os.urandom(12 << 20))
    ref = files.upload(source, "r/weights")
    parts = [path for method, path in proxy.requests if method == "PUT" and "partNumber=" in path]
    assert len(parts) == 3
    assert files.sha256("r/weights") == (ref.sha256, ref.bytes)
    assert files.download("r/weights", tmp_path / "back") == ref.sha256
    with files.writing("r/table") as file:
        file.write(source.read_bytes())
    assert files.changed_since_written(ref) is None
    assert files.sha256("r/table") == (file.sha256, 12 << 20)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.REFUSED, Fault.SLOW_DOWN], ids=lambda fault: fault.name)
@pytest.mark.parametrize("request_of", ["?uploads", "partNumber=2", "uploadId="])
def test_a_large_upload_outlives_a_passing_fault_of_each_of_its_requests(
    proxy, small_parts, tmp_path, request_of, fault
):
    files, source = StoreFiles(url()), tmp_path / "weights"
    source.write_bytes(os.urandom(11 << 20))
    method_of = {"?uploads": "POST", "partNumber=2": "PUT", "uploadId=": "POST"}  # begin, a part, complete
    proxy.matches = lambda method, path: method == method_of[request_of] and request_of in path
    proxy.faults = [fault]
    ref = files.upload(source, "r/weights")
    assert not proxy.faults, "it befell the upload"
    assert files.sha256("r/weights") == (ref.sha256, ref.bytes)


def test_an_upload_in_parts_that_the_server_forgot_starts_anew(proxy, small_parts, tmp_path):
    # What AWS says of a completion that is sent again because the first answer was lost.
    files, source = StoreFiles(url()), tmp_path / "weights"
    source.write_bytes(os.urandom(11 << 20))
    proxy.matches = lambda method, path: method == "POST" and "uploadId=" in path
    proxy.faults = [Fault.NO_SUCH_UPLOAD]
    ref = files.upload(source, "r/weights")
    assert not proxy.faults
    assert files.sha256("r/weights") == (ref.sha256, ref.bytes)


def test_a_large_file_is_invisible_until_it_is_complete(proxy, small_parts, tmp_path):
    files, source = StoreFiles(url(), patience_s=60), tmp_path / "weights"
    source.write_bytes(os.urandom(11 << 20))
    reader = StoreFiles(files.url)
    reached, go_on = threading.Event(), threading.Event()

    def before_completion(method: str, path: str) -> bool:
        if method == "POST" and "uploadId=" in path:
            reached.set()
            go_on.wait(30)
        return False

    proxy.matches, proxy.faults = before_completion, [Fault.REFUSED]
    upload = threading.Thread(target=files.upload, args=(source, "r/weights"))
    upload.start()
    assert reached.wait(60)
    seen = reader.exists("r/weights"), reader.files_below("r"), reader.names("r")
    go_on.set()
    upload.join(60)
    assert seen == (False, [], [])
    assert reader.names("r") == ["weights"]


UPLOAD = """
import sys
import infra.store.s3
from pathlib import Path
from infra.store.files import StoreFiles
infra.store.s3.PART_BYTES = 5 << 20
StoreFiles(sys.argv[1]).upload(Path(sys.argv[2]), "r/weights")
"""


def test_a_killed_upload_leaves_nothing_to_see(proxy, tmp_path):
    source, where = tmp_path / "weights", url()
    source.write_bytes(os.urandom(40 << 20))
    child = subprocess.Popen([sys.executable, "-c", UPLOAD, where, str(source)])
    deadline = time.monotonic() + 60
    while not any("partNumber=" in path for _, path in proxy.requests) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it was still under way"
    files = StoreFiles(where)
    assert not files.exists("r/weights")
    assert files.files_below("r") == []
    assert files.names("r") == []


def test_an_upload_that_gives_up_leaves_no_parts_behind(proxy, small_parts, tmp_path):
    files, source = StoreFiles(url(), patience_s=0.5), tmp_path / "weights"
    source.write_bytes(os.urandom(11 << 20))
    proxy.matches = lambda method, path: method == "PUT" and "partNumber=2" in path
    proxy.faults = [Fault.SLOW_DOWN] * 20
    with pytest.raises(StoreError, match="r/weights: no answer"):
        files.upload(source, "r/weights")
    assert not files.exists("r/weights")
    client = boto3.client("s3", endpoint_url=proxy.endpoint)
    left = [one["Key"] for one in client.list_multipart_uploads(Bucket="store").get("Uploads", [])]
    client.close()
    assert not [key for key in left if key.startswith(files.url.removeprefix("s3://store/"))]


def test_a_folder_of_many_files_is_moved_and_removed_in_few_requests(proxy):
    files = StoreFiles(url())
    for number in range(40):
        files.write(f"r/it/{number:02d}", b"%d" % number)
    proxy.requests.clear()
    target = files.move_aside("r/it", "r/aside")
    assert len(proxy.requests) <= 2 * 40 + 7  # a look and a copy for each, and one removal
    assert not files.exists("r/it")
    assert files.read(f"{target}/07") == b"7"
    proxy.requests.clear()
    files.remove_folder(target)
    assert [method for method, _ in proxy.requests] == ["GET", "POST"]  # one list, one removal
    assert files.files_below("r") == []


def test_names_with_brackets_are_no_patterns(each_s3_url):
    files = StoreFiles(f"{each_s3_url}[1]")
    files.write("r/a[0-9]*?", b"1")
    files.write("r/a5", b"2")
    files.move_aside("r", "aside")
    files.remove_folder("aside")
    assert files.files_below("") == []


def test_a_folder_whose_files_are_gone_is_gone(each_s3_url):
    # SeaweedFS lists it for a while.
    files = StoreFiles(each_s3_url)
    files.write("r/it/deep/a", b"")
    files.remove_folder("r/it")
    assert not files.exists("r/it")
    assert files.files_below("r/it") == []
    assert files.changed_below("r/it", []) == {}


def test_staging_that_cannot_be_removed_does_not_undo_a_commit(proxy, tmp_path, caplog):
    files = StoreFiles(url(), patience_s=0.2)
    small_run.start_run(files, "r", tmp_path)
    proxy.matches, proxy.faults = lambda method, path: path.endswith("?delete"), [Fault.NOT_IMPLEMENTED]
    committed = small_run.write_iteration(files, "r", 0, tmp_path)
    assert not proxy.faults
    assert read_manifest(files, "r", 0) == committed
    assert "staging: could not be removed" in caplog.text
    assert "The iteration is committed" in caplog.text
    clear_staging(files, "r", 0)
    assert not files.exists(layout.staging_folder("r", 0))


def test_a_small_table_is_read_in_one_request(proxy):
    files = StoreFiles(url())
    small_run.write_tables(files, "r", 0)
    proxy.requests.clear()
    read_table(files, layout.table_file("r", 0, "rewards"), REWARDS)
    assert [method for method, _ in proxy.requests] == ["GET"]


def test_a_table_too_large_for_one_request_is_read_by_ranges(proxy, monkeypatch):
    monkeypatch.setattr(infra.store.files, "_SMALL_BYTES", 1000)
    files = StoreFiles(url())
    small_run.write_tables(files, "r", 0)
    assert read_table(files, layout.table_file("r", 0, "rewards"), REWARDS).num_rows == 10


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_small_and_large_files_come_whole(each_s3_url, monkeypatch, size):
    monkeypatch.setattr(infra.store.files, "_SMALL_BYTES", 1000)
    files, data = StoreFiles(each_s3_url), os.urandom(size)
    ref = files.write("r/a", data)
    with files.open("r/a") as file:
        assert file.read() == data
    assert files.sha256("r/a") == (ref.sha256, size)


def test_a_small_file_is_written_in_one_request_and_in_an_iteration_in_two(proxy):
    files = StoreFiles(url())
    files.write("r/a", b"")
    assert [method for method, _ in proxy.requests] == ["PUT"]
    proxy.requests.clear()
    files.write("r/iterations/00000000/rewards.parquet", b"")
    assert [method for method, _ in proxy.requests] == ["HEAD", "PUT"]  # is the iteration committed?


def test_a_file_written_again_in_the_same_second_with_the_same_bytes_has_another_identity(each_s3_url):
    files = StoreFiles(each_s3_url)
    ref = files.write("r/a", b"same")
    first = files.identity("r/a")
    assert files.identity("r/a") == first
    StoreFiles(each_s3_url).write("r/a", b"same")
    assert files.identity("r/a") != first
    assert files.changed_since_written(ref) is None, "equal bytes are no change"
    with pytest.raises(FileNotFoundError):
        files.identity("r/b")


def test_open_store_passes_the_promise_on():
    assert open_store("memory://promise", single_writer=True).single_writer
    assert not open_store("memory://promise").single_writer


def test_a_run_on_each_server_is_whole(each_s3_url, tmp_path: Path):
    files = StoreFiles(each_s3_url)
    run = small_run.write_run(files, "r", tmp_path, 2)
    assert verify_run(run).sound
    assert not files.exists(layout.staging_folder("r", 1))
