import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.files import StoreFiles


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server of this test session with one bucket, `store`."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="store")
    yield endpoint
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on that server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    return f"s3://store/{uuid.uuid4().hex}"


@pytest.fixture
def local_files(tmp_path: Path) -> StoreFiles:
    return StoreFiles(str(tmp_path / "store"))


@pytest.fixture(params=["local", "memory", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """The same store on a disk, in memory and on an object store."""
    if request.param == "local":
        return StoreFiles(str(tmp_path / "store"))
    if request.param == "memory":
        return StoreFiles(f"memory://{uuid.uuid4().hex}")
    return StoreFiles(request.getfixturevalue("s3_url"))


@pytest.fixture(params=["local", "memory"])
def near_files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """The first two of them, for what takes many requests."""
    return StoreFiles(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")
