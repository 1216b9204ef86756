"""Servers that ignore If-None-Match: refused, unless one writer is promised."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from infra.store.files import StoreFiles
from infra.store.probe import probe
from infra.store.runs import create_or_open_run, open_store
from infra.store.verify import verify_run
from mgrpo_core.errors import AlreadyCommittedError, StoreError
from tests.infra.store import small_run
from tests.servers.s3_proxy import Fault, s3_proxy


@pytest.fixture
def deaf_url(moto_endpoint, monkeypatch, request):
    """On a server that never hears the condition."""
    with s3_proxy(moto_endpoint) as proxy:
        proxy.drops = ("if-none-match",)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield f"s3://store/{request.node.name}"


@pytest.fixture
def rclone_url(tmp_path, monkeypatch):
    """On rclone's S3 server, where there is an rclone."""
    rclone = shutil.which("rclone")
    if rclone is None:
        pytest.skip("no rclone on this machine")
    (tmp_path / "rclone" / "store").mkdir(parents=True)
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probing.getsockname()[1]}"
    command = [rclone, "serve", "s3", str(tmp_path / "rclone"), "--addr", address, "--auth-key", "testing,testing"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://{address}", timeout=1)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
            else:
                break
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        yield "s3://store/x"
    finally:
        server.kill()
        server.wait(10)


@pytest.fixture(params=["deaf_url", "rclone_url"])
def unconditional_url(request) -> str:
    return request.getfixturevalue(request.param)


def test_it_is_refused_before_work_starts_with_both_ways_out(unconditional_url):
    with pytest.raises(StoreError, match="ignores conditional writes") as caught:
        create_or_open_run(open_store(unconditional_url), "r", small_run.config())
    assert "two writers could both commit an iteration" in str(caught.value)
    assert "execution.single_writer: true" in str(caught.value)
    assert open_store(unconditional_url).files_below("") == []


def test_a_promised_single_writer_trains_there(unconditional_url, tmp_path):
    files = open_store(unconditional_url, single_writer=True)
    run = small_run.write_run(files, "r", tmp_path, 2)
    assert verify_run(run).sound


def test_a_promised_single_writer_still_replaces_nothing(unconditional_url):
    files = StoreFiles(unconditional_url, single_writer=True)
    probe(files, "r")
    files.create("r/manifest.json", b"first")
    with pytest.raises(FileExistsError):
        files.create("r/manifest.json", b"second")
    assert files.read("r/manifest.json") == b"first"


def test_a_second_commit_is_refused_with_the_first_ones_writer(deaf_url, tmp_path):
    files = StoreFiles(deaf_url, single_writer=True)
    small_run.start_run(files, "r", tmp_path)
    small_run.write_iteration(files, "r", 0, tmp_path)
    with pytest.raises(AlreadyCommittedError, match="committed already"):
        small_run.write_iteration(files, "r", 0, tmp_path)


def test_without_the_promise_a_look_would_not_have_helped(deaf_url):
    files = StoreFiles(deaf_url)
    files.create("r/manifest.json", b"first")
    files.create("r/manifest.json", b"second")  # what the probe is for
    assert files.read("r/manifest.json") == b"second"


def test_a_server_that_refuses_the_header_is_told_apart_and_will_do_for_one_writer(moto_endpoint, monkeypatch):
    with s3_proxy(moto_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.matches = lambda method, path: method == "PUT"
        proxy.faults = [Fault.NOT_IMPLEMENTED]
        with pytest.raises(StoreError, match="refuses conditional writes"):
            probe(StoreFiles("s3://store/refusing"), "r")
        proxy.faults = [Fault.NOT_IMPLEMENTED]
        files = StoreFiles("s3://store/refusing", single_writer=True)
        files.create("r/a", b"mine")
        assert files.read("r/a") == b"mine"


def test_a_promise_on_a_store_that_needs_none_changes_nothing(files):
    promised = StoreFiles(files.url, single_writer=True)
    probe(promised, "r")
    promised.create("r/a", b"first")
    with pytest.raises(FileExistsError):
        files.create("r/a", b"second")
