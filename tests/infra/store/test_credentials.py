"""A store's secrets come from the environment, a file or a role, and go nowhere."""

import io
import logging
import traceback

import pytest

from infra.store.files import StoreFiles
from infra.store.probe import probe
from infra.store.runs import create_or_open_run, require_run
from infra.store.verify import verify_run
from mgrpo_core.errors import MGRPOError, StoreError
from tests.infra.store import small_run
from tests.servers.s3_proxy import Fault, s3_proxy
from tests.servers.seaweedfs import running_seaweedfs

ID, SECRET, TOKEN = (
    "AKIAPLANTEDKEY000001",
    "planted/secret+key0123456789abcdefghijkl",
    "planted-session-token-0123456789",
)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{ID}:{SECRET}@bucket/prefix",
        "s3://key:secret@bucket",
        "s3a://key:secret@bucket/prefix",
        "s3://key@bucket/prefix",
        "sftp://user:password@host/folder",
        "https://user:password@host:9000/bucket",
        "simplecache::s3://key:se/cret@bucket/prefix",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url):
    with pytest.raises(StoreError) as caught:
        StoreFiles(url)
    said = "".join(traceback.format_exception(caught.value))
    assert "holds credentials" in str(caught.value)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    for secret in (url, ID, SECRET, "password", "secret@", "se/cret"):
        assert secret not in str(caught.value)
    assert SECRET not in said
    assert ID not in said


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_with_credentials_is_refused_too(name, monkeypatch):
    monkeypatch.setenv(name, f"http://{ID}:{SECRET}@127.0.0.1:1")
    with pytest.raises(StoreError, match=f"the environment's {name} holds credentials") as caught:
        StoreFiles("s3://bucket/prefix")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix@2026:1/x",
        "s3://bucket/a:b/c@d",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/point/prefix@x",
    ],
)
def test_an_at_sign_or_colon_elsewhere_is_no_credential(url):
    assert StoreFiles(url).url == url


def test_a_local_folder_may_be_called_anything(tmp_path):
    folder = tmp_path / "me:you@home"
    StoreFiles(str(folder)).write("r/a", b"x")
    assert (folder / "r" / "a").read_bytes() == b"x"


@pytest.fixture
def planted(monkeypatch):
    """A server whose account is a secret of this test, and what mgrpo and its libraries log meanwhile."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    with running_seaweedfs((ID, SECRET)) as server, s3_proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy, text
    logging.getLogger().setLevel(level)
    logging.getLogger().removeHandler(handler)


def test_no_secret_is_in_any_byte_of_a_run_nor_in_logs_nor_in_errors(planted, tmp_path, monkeypatch):
    proxy, log = planted
    files = StoreFiles("s3://store/x", patience_s=2)
    run = small_run.start_run(files, "r", tmp_path)
    parent = small_run.write_iteration(files, "r", 0, tmp_path)
    proxy.faults = [Fault.SLOW_DOWN, Fault.LOST, Fault.REFUSED]
    small_run.write_iteration(files, "r", 1, tmp_path, parent)
    assert verify_run(run).sound
    paths = files.files_below("")
    assert len(paths) > 20
    stored = b"".join(path.encode() + files.read(path) for path in paths)

    said = []
    proxy.faults = [Fault.INTERNAL_ERROR] * 50
    for attempt in (lambda: files.write("r/a", b""), lambda: require_run(files, "nothing")):
        with pytest.raises(MGRPOError) as caught:
            attempt()
        said.append("".join(traceback.format_exception(caught.value)))
    proxy.faults = []
    said += [refusal(lambda: require_run(files, "nothing"))]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET[::-1])
    said += [refusal(lambda: probe(StoreFiles("s3://store/x"), "r"))]
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    said += [refusal(lambda: create_or_open_run(StoreFiles("s3://store/x"), "r", small_run.config()))]
    told = "".join(said) + log.getvalue() + repr(files) + repr(vars(files))
    assert "Asking again for up to" in told
    assert "cannot be written" in told
    for secret in (SECRET, SECRET[::-1], TOKEN):
        assert secret.encode() not in stored
        assert secret not in told
    assert ID.encode() not in stored


def refusal(attempt) -> str:
    with pytest.raises(MGRPOError) as caught:
        attempt()
    return "".join(traceback.format_exception(caught.value))
