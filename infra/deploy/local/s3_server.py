"""SeaweedFS as the S3 server: one process, one identity, one bucket, all of it on 127.0.0.1."""

import json
from collections.abc import Mapping
from pathlib import Path

import botocore.session
from botocore.config import Config

from infra.deploy.local.extra import program_path
from infra.deploy.local.home import LocalHome, Running, make_private_folder, write_private
from infra.deploy.local.ports import HOST
from infra.deploy.local.program import Program
from infra.deploy.local.settings import Ports
from infra.deploy.settings import BUCKET, S3_CLIENT

# In the order of Ports.s3_inner.
_INNER_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
                "s3.port.grpc")  # fmt: skip
_PROBE_KEY = "probe"
_PROBE_BODY = b"mgrpo"


class LocalS3:
    """The S3 server of a home."""

    def __init__(self, home: LocalHome) -> None:
        self._home = home
        self._weed = program_path("weed", "the S3 server, SeaweedFS")

    def create(self) -> None:
        """Write its accounts, and make the folder of its data."""
        keys = self._home.keys()
        identity = {
            "name": "mgrpo",
            "credentials": [{"accessKey": keys.s3_access_key, "secretKey": keys.s3_secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        write_private(self._accounts, json.dumps({"identities": [identity]}))
        make_private_folder(self._folder)

    def environment(self, port: int) -> dict[str, str]:
        """What any S3 client reads."""
        keys = self._home.keys()
        return {
            "AWS_ENDPOINT_URL": _url(port),
            "AWS_ACCESS_KEY_ID": keys.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": keys.s3_secret_key,
            **S3_CLIENT,
        }

    def program(self, running: Running, *, step: int) -> Program:
        """The server; it answers once the bucket is there and gives back what was put."""
        ports = running.settings.ports
        environment = self.environment(ports.s3)
        return Program(
            name="s3",
            title="S3 server",
            place=_url(ports.s3),
            command=(
                self._weed,
                "-logtostderr=true",
                "server",
                f"-dir={self._folder}",
                f"-ip={HOST}",
                f"-ip.bind={HOST}",
                "-volume.max=1000",  # default 8: few large volumes, for a disk of its own
                "-master.volumeSizeLimitMB=1024",
                "-master.telemetry=false",
                "-s3",
                f"-s3.port={ports.s3}",
                f"-s3.config={self._accounts}",
                "-master.raftHashicorp",  # with the next: up again in 2 s instead of 20
                "-master.raftBootstrap",
                "-s3.autoCreateBucket=false",  # a misspelt bucket is an error
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                f"-s3.localSocket={running.sockets}/s3.sock",
                f"-filer.localSocket={running.sockets}/filer.sock",
                *(f"-{name}={port}" for name, port in zip(_INNER_PORTS, ports.s3_inner, strict=True)),
            ),
            environment={},
            directory=self._folder,
            answers=lambda _: _stores_and_gives_back(environment),
            deadline_s=90,
            step=step,
            stop_signal="INT",
            stop_wait_s=2,  # it never comes to its end by itself; what it acknowledged is written
        )

    def remove_sockets(self, ports: Ports) -> None:
        """Remove what it leaves when it is killed: sockets named by their port, in a folder of its choice."""
        for part, port in zip(_INNER_PORTS, ports.s3_inner, strict=True):
            name = f"seaweedfs-{part.split('.')[0]}-grpc-{port}.sock"
            Path("/tmp", name).unlink(missing_ok=True)  # noqa: S108  # its choice

    @property
    def _accounts(self) -> Path:
        return self._home.data / "s3.json"

    @property
    def _folder(self) -> Path:
        return self._home.data / "s3"


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _stores_and_gives_back(environment: Mapping[str, str]) -> bool:
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
        config=Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}, proxies={}),
    )
    try:
        if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key=_PROBE_KEY, Body=_PROBE_BODY)
        found = client.get_object(Bucket=BUCKET, Key=_PROBE_KEY)["Body"].read()
        client.delete_object(Bucket=BUCKET, Key=_PROBE_KEY)
        return found == _PROBE_BODY
    finally:
        client.close()
