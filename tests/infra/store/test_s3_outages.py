"""A server that fails for a while: nothing is lost, nothing is done twice, and its end is told."""

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

import infra.store.files
import infra.store.patience
from infra.store import layout
from infra.store.files import PATIENCE_S, StoreFiles
from infra.store.manifests import commit_manifest, read_manifest
from infra.store.probe import probe
from infra.store.schemas import ALIGNMENT
from infra.store.tables import read_table, table_of, write_table
from mgrpo_core.errors import AlreadyCommittedError, StoreError
from tests.infra.store import small_run
from tests.servers.s3_proxy import Fault, S3Proxy, s3_proxy
from tests.servers.seaweedfs import running_seaweedfs

PASSING = (
    Fault.REFUSED,
    Fault.LOST,
    Fault.CUT,
    Fault.INTERNAL_ERROR,
    Fault.BAD_GATEWAY,
    Fault.SLOW_DOWN,
    Fault.TOO_MANY_REQUESTS,
)


# Where the faults are the proxy's, and every request is tried with each.
SEAWEEDFS_ONLY = pytest.mark.parametrize("proxy", ["seaweedfs_endpoint"], ids=["seaweedfs"], indirect=True)


@pytest.fixture(params=["moto_endpoint", "seaweedfs_endpoint"], ids=["moto", "seaweedfs"])
def proxy(request, monkeypatch):
    """Before each server in turn; the environment points to it."""
    with s3_proxy(request.getfixturevalue(request.param)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def s3_files(proxy, request):
    return StoreFiles(f"s3://store/{request.node.name}", patience_s=20)


@SEAWEEDFS_ONLY
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
def test_every_operation_outlives_a_passing_fault(s3_files, proxy: S3Proxy, fault, tmp_path):
    def failing(operation, *arguments):
        proxy.faults = [fault]
        try:
            return operation(*arguments)
        finally:
            assert not proxy.faults, "it befell the operation"

    (tmp_path / "weights").write_bytes(b"w" * 100_000)
    ref = failing(s3_files.write, "r/a/b", b"hello" * 1000)
    failing(s3_files.upload, tmp_path / "weights", "r/a/weights")
    failing(s3_files.create, "r/a/new", b"mine" * 1000)
    assert failing(s3_files.read, "r/a/b") == b"hello" * 1000
    assert failing(s3_files.sha256, "r/a/b") == (ref.sha256, ref.bytes)
    assert failing(s3_files.holds, "r/a/b")
    assert not failing(s3_files.holds, "r/a/c")
    assert failing(s3_files.names, "r/a") == ["b", "new", "weights"]
    assert failing(s3_files.changed_since_written, ref) is None
    failing(s3_files.download, "r/a/weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"w" * 100_000
    assert failing(s3_files.move_aside, "r/a", "r/aside") == "r/aside/0000-r_a"
    assert s3_files.read("r/aside/0000-r_a/new") == b"mine" * 1000
    failing(s3_files.remove_folder, "r/aside")
    assert s3_files.files_below("r") == []


@SEAWEEDFS_ONLY
@pytest.mark.parametrize("small_bytes", [4 << 20, 1000], ids=["whole", "ranges"])
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
def test_a_table_is_read_through_a_passing_fault(s3_files, proxy: S3Proxy, fault, small_bytes, monkeypatch):
    monkeypatch.setattr(infra.store.files, "_SMALL_BYTES", small_bytes)
    rows = {name: [name] * 9 if name in ("agent", "query_id") else [0] * 9 for name in ALIGNMENT.columns.names}
    rows |= {"trajectory_id": ["t"] * 9, "weight": [0.5] * 9}
    write_table(s3_files, "r/alignment.parquet", ALIGNMENT, table_of(ALIGNMENT, rows))
    for after in range(6):  # the fault befalls each request of the reader in turn
        requests = iter(range(100))
        proxy.matches = lambda method, path, after=after, requests=requests: next(requests) == after
        proxy.faults = [fault]
        assert read_table(s3_files, "r/alignment.parquet", ALIGNMENT).num_rows == 9
        if proxy.faults:
            break
    assert after > (0 if small_bytes > 1000 else 2), "it befell every request"


def test_a_first_answer_that_is_lost_does_not_turn_the_winner_into_a_loser(s3_files, proxy: S3Proxy):
    proxy.faults = [Fault.LOST, Fault.SLOW_DOWN]
    s3_files.create("r/manifest.json", b"mine")
    assert [method for method, _ in proxy.requests].count("PUT") == 3
    assert s3_files.read("r/manifest.json") == b"mine"


def test_an_answer_lost_on_a_kept_connection_does_not_either(s3_files, proxy: S3Proxy):
    s3_files.names("r")
    proxy.faults = [Fault.LOST]  # aiohttp sends such a request again by itself
    s3_files.create("r/manifest.json", b"mine")
    assert s3_files.read("r/manifest.json") == b"mine"


def test_a_server_that_keeps_no_metadata_is_asked_for_the_content(moto_endpoint, monkeypatch):
    with s3_proxy(moto_endpoint) as proxy:
        proxy.drops = ("x-amz-meta-mgrpo-written-by",)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        files = StoreFiles("s3://store/no-metadata")
        proxy.faults = [Fault.LOST]
        files.create("r/manifest.json", b"mine")
        proxy.faults = [Fault.LOST]
        with pytest.raises(FileExistsError):
            files.create("r/manifest.json", b"yours")


def test_a_lost_answer_does_not_turn_a_loser_into_the_winner(s3_files, proxy: S3Proxy):
    s3_files.create("r/manifest.json", b"theirs")
    proxy.faults = [Fault.LOST]
    with pytest.raises(FileExistsError):
        s3_files.create("r/manifest.json", b"mine")
    assert s3_files.read("r/manifest.json") == b"theirs"


def test_equal_bytes_of_another_writer_are_anothers(s3_files):
    s3_files.create("r/manifest.json", b"the same")
    with pytest.raises(FileExistsError):
        s3_files.create("r/manifest.json", b"the same")


def test_a_conflict_with_a_conditional_write_under_way_is_tried_again(s3_files, proxy: S3Proxy):
    proxy.faults = [Fault.CONDITIONAL_REQUEST_CONFLICT] * 2
    s3_files.create("r/a", b"first")
    assert s3_files.read("r/a") == b"first"


def test_a_commit_whose_answer_is_lost_is_one(s3_files, proxy: S3Proxy, tmp_path):
    small_run.start_run(s3_files, "r", tmp_path)
    tables = small_run.write_tables(s3_files, "r", 0)
    proxy.matches = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    proxy.faults = [Fault.LOST, Fault.LOST]
    committed = commit_manifest(s3_files, small_run.manifest("r", 0, tables, {}, writer="one"))
    assert read_manifest(s3_files, "r", 0) == committed
    with pytest.raises(AlreadyCommittedError, match=r"committed already, by one\. .* This was two\."):
        commit_manifest(s3_files, small_run.manifest("r", 0, tables, {}, writer="two"))


def test_the_wait_is_told_once_and_its_end_too(s3_files, proxy: S3Proxy, caplog):
    proxy.faults = [Fault.SLOW_DOWN] * 3
    s3_files.write("r/a", b"")
    told = [record.getMessage() for record in caplog.records if record.name == "mgrpo.store"]
    assert len(told) == 2
    assert "/r/a: no answer (ClientError" in told[0]
    assert "Asking again for up to 20 s" in told[0]
    assert told[1].endswith("/r/a: answers again.")


@pytest.fixture
def nobody(monkeypatch):
    """The environment points to an address where nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Between two requests, in seconds, on a clock that moves by them alone: however busy the machine is."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(infra.store.patience, "time", SimpleNamespace(monotonic=lambda: sum(made)))
    monkeypatch.setattr(
        infra.store.patience, "asyncio", SimpleNamespace(sleep=sleep, TimeoutError=asyncio.TimeoutError)
    )
    return made


@pytest.mark.usefixtures("nobody")
def test_patience_ends_with_what_was_asked_for_how_long_and_what_to_do(pauses):
    with pytest.raises(StoreError) as caught:
        StoreFiles("s3://store/x", patience_s=2).write("r/a", b"")
    assert sum(pauses) == pytest.approx(2)
    assert str(caught.value).startswith("s3://store/x/r/a: no answer for 2 s (EndpointConnectionError")
    assert "Start the same command again when the store is back: it resumes." in str(caught.value)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("operation", ["probe", "read", "names", "table"])
def test_no_operation_multiplies_the_patience(operation, pauses):
    files = StoreFiles("s3://store/x", patience_s=2)
    asked = {
        "probe": lambda: probe(files, "r"),
        "read": lambda: files.read("r/a"),
        "names": lambda: files.names("r"),
        "table": lambda: read_table(files, "r/a.parquet", ALIGNMENT),
    }
    with pytest.raises(StoreError, match="no answer for 2 s"):
        asked[operation]()
    assert sum(pauses) == pytest.approx(2)


def test_a_refusal_is_told_at_once(s3_files, pauses, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    if "moto" in s3_files.url:
        pytest.skip("checks no signatures")
    with pytest.raises(StoreError, match="cannot be written"):
        s3_files.write("r/a", b"")
    assert not pauses


def test_sixty_four_writers_at_once_outlive_a_server_that_refuses_them_all(s3_files, proxy: S3Proxy):
    # More failures than the quota of botocore's own retries holds.
    proxy.faults = [Fault.REFUSED] * 400
    with ThreadPoolExecutor(64) as writers:
        list(writers.map(lambda number: s3_files.write(f"r/{number}", b"%d" % number), range(64)))
    assert not proxy.faults
    assert len(s3_files.files_below("r")) == 64


def test_a_server_that_is_killed_and_comes_back_fails_nothing(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "mgrpo.store")
    with running_seaweedfs() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        files = StoreFiles("s3://store/x")
        run = small_run.start_run(files, "r", tmp_path)
        first = small_run.write_iteration(files, "r", 0, tmp_path)
        made: list[object] = []

        def iterate() -> None:
            parent = first
            for iteration in (1, 2, 3):
                parent = small_run.write_iteration(files, "r", iteration, tmp_path, parent)
                made.append(parent)

        worker = threading.Thread(target=iterate)
        server.kill()
        worker.start()
        time.sleep(3)
        server.start()
        worker.join(60)
        assert len(made) == 3
        assert read_manifest(files, "r", 3) == made[-1]
        assert run.files.holds(layout.manifest_file("r", 3))
    assert any("Asking again for up to 180 s" in record.getMessage() for record in caplog.records)


def test_patience_covers_a_minute_without_a_server():
    assert PATIENCE_S >= 60


def test_the_data_are_there_after_the_server_was_killed(monkeypatch, tmp_path: Path):
    with running_seaweedfs() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        small_run.write_run(StoreFiles("s3://store/x"), "r", tmp_path, 1)
        server.kill()
        server.start()
        assert read_manifest(StoreFiles("s3://store/x"), "r", 0).manifest.iteration == 0
        boto3.client("s3", endpoint_url=server.endpoint).close()
