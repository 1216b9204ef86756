import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.files import StoreFiles
from tests.servers.seaweedfs import seaweedfs_endpoint

__all__ = ["seaweedfs_endpoint"]


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """A small S3 server of this test session with one bucket, `store`. Fast, and says some things as AWS does."""
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
def s3_url(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on the small server, for what does not depend on the server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    return f"s3://store/{uuid.uuid4().hex}"


@pytest.fixture
def seaweedfs_url(seaweedfs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on the real server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs_endpoint)
    return f"s3://store/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3_url", "seaweedfs_url"], ids=["moto", "seaweedfs"])
def each_s3_url(request: pytest.FixtureRequest) -> str:
    """A prefix of its own on each of them."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def local_files(tmp_path: Path) -> StoreFiles:
    return StoreFiles(str(tmp_path / "store"))


@pytest.fixture(params=["local", "memory", "s3_url", "seaweedfs_url"], ids=["local", "memory", "moto", "seaweedfs"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """The same store on a disk, in memory and on each S3 server."""
    if request.param == "local":
        return StoreFiles(str(tmp_path / "store"))
    if request.param == "memory":
        return StoreFiles(f"memory://{uuid.uuid4().hex}")
    return StoreFiles(request.getfixturevalue(request.param))


@pytest.fixture(params=["local", "memory", "seaweedfs_url"], ids=["local", "memory", "seaweedfs"])
def raced_files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """Those on which writers may race: moto looks whether a key is there, and then writes it, in two steps."""
    if request.param == "seaweedfs_url":
        return StoreFiles(request.getfixturevalue(request.param))
    return StoreFiles(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["local", "memory"])
def near_files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """The first two of them, for what takes many requests."""
    return StoreFiles(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")
