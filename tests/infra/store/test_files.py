import errno
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from infra.store.files import FileRef, StoreFiles
from infra.store.probe import probe
from mgrpo_core.errors import AlreadyCommittedError, StoreError, StoreNotWritableError, TableIntegrityError


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_reads_back_as_written_with_its_hash(files):
    ref = files.write("r/a/b.json", b"hello")
    # printf hello | sha256sum
    assert ref == FileRef("r/a/b.json", "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", 5)
    assert files.read("r/a/b.json") == b"hello"
    assert files.sha256("r/a/b.json") == (ref.sha256, 5)


def test_a_file_is_replaced_as_a_whole(files):
    files.write("r/a", b"a long first content")
    files.write("r/a", b"short")
    assert files.read("r/a") == b"short"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(files):  # case E11
    files.write("r/a", b"old")

    def fail() -> None:
        with files.writing("r/a") as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files.read("r/a") == b"old"
    assert files.names("r") == ["a"]
    if files.is_local:
        assert everything_below(Path(files.root)) == ["r/a"]


def test_a_missing_file_is_named_with_its_address(files):
    with pytest.raises(TableIntegrityError, match=f"{files.url.rstrip('/')}/r/nothing: missing"):
        files.read("r/nothing")
    with pytest.raises(TableIntegrityError, match="missing"):
        files.sha256("r/nothing")


def test_a_second_creation_fails_and_changes_nothing(files):
    files.create("r/manifest.json", b"first")
    with pytest.raises(FileExistsError):
        files.create("r/manifest.json", b"second")
    assert files.read("r/manifest.json") == b"first"


def test_of_many_threads_one_creates(files, request):
    def wins(number: int) -> bool:
        try:
            files.create("r/manifest.json", b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, one in enumerate(pool.map(wins, range(8))) if one]
    if not files.url.startswith("s3:") or "seaweedfs" in request.node.name:  # moto looks, then puts
        assert len(won) == 1
    assert int(files.read("r/manifest.json")) in won


RACER = """
import sys, time
from pathlib import Path
from infra.store.files import StoreFiles
files, name, gate = StoreFiles(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
for number in range(100):
    try:
        files.create(f"r/{number}", name.encode() * 1000)
    except FileExistsError:
        continue
    print(number, flush=True)
"""


def test_of_several_processes_exactly_one_creates_each_file(tmp_path):
    store, gate = tmp_path / "store", tmp_path / "go"
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(store), name, str(gate)], stdout=subprocess.PIPE, text=True)
        for name in "abc"
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    gate.touch()
    won = {name: racer.communicate(timeout=60)[0].split() for name, racer in zip("abc", racers, strict=True)}
    assert sorted(int(number) for numbers in won.values() for number in numbers) == list(range(100))
    files = StoreFiles(str(store))
    for name, numbers in won.items():
        assert all(files.read(f"r/{number}") == name.encode() * 1000 for number in numbers)


HALTED = """
import sys, time
from infra.store.files import StoreFiles

class Halted(StoreFiles):
    def _refuse_if_committed(self, path):  # the last step before the file takes its place
        print("complete", flush=True)
        time.sleep(600)

Halted(sys.argv[1]).write("r/a", b"new" * 100_000)
"""


def test_a_kill_between_write_and_rename_shows_the_reader_nothing_new(local_files):  # case E11
    local_files.write("r/a", b"old")
    child = subprocess.Popen([sys.executable, "-c", HALTED, local_files.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "complete\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    left = everything_below(Path(local_files.root))
    assert len(left) == 2, "the complete temporary file is still there"
    assert local_files.read("r/a") == b"old"
    assert local_files.names("r") == ["a"]
    assert local_files.files_below("r") == ["r/a"]
    assert not [name for name in left if name.endswith((".parquet", ".json"))]
    local_files.write("r/a", b"new")
    assert local_files.read("r/a") == b"new"


def test_a_reader_that_has_a_file_open_keeps_the_version_that_it_opened(local_files):
    local_files.write("r/a", b"old" * 100_000)
    with Path(local_files.full("r/a")).open("rb") as file:
        local_files.write("r/a", b"new")
        assert file.read() == b"old" * 100_000  # renamed over, not written over
    assert local_files.read("r/a") == b"new"


WRITER = """
import itertools, sys
from infra.store.files import StoreFiles
files = StoreFiles(sys.argv[1])
for number in itertools.count():
    files.write("r/a", b"%08d" % number * 200_000)
    if number == 0:
        print("first", flush=True)
"""


def test_a_reader_beside_a_writer_that_is_killed_always_sees_one_whole_version(local_files):
    child = subprocess.Popen([sys.executable, "-c", WRITER, local_files.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "first\n"
    seen: set[bytes] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 5 and time.monotonic() < deadline:
        data = local_files.read("r/a")
        seen.add(data[:8])
        assert data == data[:8] * 200_000
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    data = local_files.read("r/a")
    assert data == data[:8] * 200_000
    assert len(seen) == 5


TOO_LARGE = """
import resource, sys
from infra.store.files import StoreFiles
from mgrpo_core.errors import StoreNotWritableError
files = StoreFiles(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    files.write("r/a", bytes(5 << 20))
except StoreNotWritableError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_leaves_the_old_file_in_place(local_files):  # case E11
    local_files.write("r/a", b"old")
    said = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, local_files.url], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "No space left. Nothing of this file was kept" in said
    assert f"{local_files.root}/r/a" in said
    assert local_files.read("r/a") == b"old"
    assert everything_below(Path(local_files.root)) == ["r/a"]


class FullDisk(MemoryFileSystem):
    """Takes 1,000 bytes of a file, then has no space."""

    protocol = "fulldisk"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    def put_file(self, lpath, rpath, **kwargs):
        if Path(lpath).stat().st_size > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if len(value) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().pipe_file(path, value, mode=mode, **kwargs)


class Deaf(MemoryFileSystem):
    """Ignores the condition of a conditional write, as some S3 servers do."""

    protocol = "deaf"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return super().pipe_file(path, value, mode="overwrite", **kwargs)


class Unreachable(MemoryFileSystem):
    """A store whose network is down."""

    protocol = "unreachable"

    def info(self, path, **kwargs):
        raise ConnectionError("no route")

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise ConnectionError("no route")


for _kind in (FullDisk, Deaf, Unreachable):
    fsspec.register_implementation(_kind.protocol, _kind, clobber=True)


def test_no_space_on_an_object_store_is_said_and_nothing_appears():
    files = StoreFiles("fulldisk://store")
    with pytest.raises(StoreNotWritableError, match="No space left"):
        files.write("r/a", bytes(2000))
    with pytest.raises(StoreNotWritableError, match="No space left"):
        files.create("r/manifest.json", bytes(2000))
    assert files.names("r") == []


def test_a_store_that_ignores_conditional_writes_is_refused_before_work_starts():
    with pytest.raises(StoreError, match="ignores conditional writes"):
        probe(StoreFiles("deaf://store"), "r")


def test_a_store_that_gives_no_answer_is_not_an_empty_store():
    files = StoreFiles("unreachable://store")
    with pytest.raises(ConnectionError):
        files.exists("r/run.json")
    with pytest.raises(StoreNotWritableError, match=r"unreachable://store/r: cannot be written .*no route.*--store"):
        probe(files, "r")


def test_a_probe_leaves_nothing_behind(files):
    probe(files, "r")
    assert files.files_below("") == []


def test_a_bucket_that_does_not_exist_is_said_before_work_starts(each_s3_url):
    with pytest.raises(StoreNotWritableError, match="s3://no-such-bucket/x/r: cannot be written"):
        probe(StoreFiles("s3://no-such-bucket/x"), "r")


def test_a_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreNotWritableError, match="--store"):
        probe(StoreFiles(str(tmp_path / "store")), "r")


def test_a_url_that_no_file_system_answers_to_is_refused():
    with pytest.raises(StoreError, match="no file system"):
        StoreFiles("nosuch://store")


def test_another_process_sees_a_new_file_after_it_listed_the_folder(each_s3_url):  # case E14
    reader, writer = StoreFiles(each_s3_url), StoreFiles(each_s3_url)
    writer.write("r/it/a.parquet", b"a")
    assert reader.names("r/it") == ["a.parquet"]
    assert not reader.exists("r/it/_SUCCESS")
    writer.write("r/it/b.parquet", b"b")
    writer.write("r/it/_SUCCESS", b"")
    assert reader.exists("r/it/_SUCCESS")
    assert reader.names("r/it") == ["_SUCCESS", "a.parquet", "b.parquet"]
    assert reader.read("r/it/b.parquet") == b"b"
    assert [path.rsplit("/", 1)[-1] for path in reader.files_below("r/it")] == ["_SUCCESS", "a.parquet", "b.parquet"]


def test_a_file_of_a_committed_iteration_is_never_replaced(files):
    files.write("r/iterations/00000003/rewards.parquet", b"winner")
    files.create("r/iterations/00000003/manifest.json", b"{}")
    with pytest.raises(AlreadyCommittedError, match="committed already"):
        files.write("r/iterations/00000003/rewards.parquet", b"a process that was overtaken")
    assert files.read("r/iterations/00000003/rewards.parquet") == b"winner"
    files.write("r/iterations/00000004/rewards.parquet", b"the next one")


def test_a_change_behind_the_writers_back_is_noticed_without_reading(files):
    ref = files.write("r/a", b"mine")
    assert files.changed_since_written(ref) is None
    StoreFiles(files.url).write("r/a", b"longer than mine")
    assert files.changed_since_written(ref) == "it has 16 bytes, 4 were written"
    files.remove("r/a")
    assert files.changed_since_written(ref) == "it is missing"


def test_a_change_of_the_same_size_is_noticed_too(files):
    if files.url.startswith("memory"):
        pytest.skip("knows sizes only")
    ref = files.write("r/a", b"mine")
    StoreFiles(files.url).write("r/a", b"them")
    assert files.changed_since_written(ref) == "another process wrote it since"
    files.forget("r")
    assert files.changed_since_written(ref) is None


def test_a_folder_moved_aside_keeps_its_files_under_a_name_that_was_free(files):
    for content in (b"1", b"22"):
        files.write("r/it/a", content)
        files.write("r/it/deep/b", content)
        files.move_aside("r/it", "r/aside")
        assert not files.exists("r/it")
    assert files.names("r/aside") == ["0000-r_it", "0001-r_it"]
    assert files.files_below("r") == [
        "r/aside/0000-r_it/a",
        "r/aside/0000-r_it/deep/b",
        "r/aside/0001-r_it/a",
        "r/aside/0001-r_it/deep/b",
    ]
    assert files.read("r/aside/0001-r_it/deep/b") == b"22"


def test_removing_a_folder_that_is_not_there_does_nothing(files):
    files.write("r/a/b", b"")
    files.remove_folder("r/nothing")
    files.remove_folder("r/a")
    assert files.files_below("r") == []


def test_files_of_a_local_store_are_as_readable_as_the_umask_allows(local_files):
    before = os.umask(0o027)
    try:
        local_files.write("r/a", b"")
        local_files.create("r/b", b"")
    finally:
        os.umask(before)
    for name in "ab":
        assert stat.S_IMODE(Path(local_files.full(f"r/{name}")).stat().st_mode) == 0o640


def test_uploaded_and_downloaded_bytes_are_hashed(files, tmp_path):
    source = tmp_path / "weights"
    source.write_bytes(os.urandom(3 << 20))
    ref = files.upload(source, "r/weights")
    assert files.sha256("r/weights") == (ref.sha256, ref.bytes)
    assert files.download("r/weights", tmp_path / "new" / "copy") == ref.sha256
    assert (tmp_path / "new" / "copy").read_bytes() == source.read_bytes()


def test_urls_are_for_people(tmp_path):
    assert StoreFiles(f"{tmp_path}/").uri("r/a") == f"{tmp_path}/r/a"
    assert StoreFiles(f"memory://{uuid.uuid4().hex}/").uri("r/a").endswith("/r/a")
