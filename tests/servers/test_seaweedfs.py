import urllib.error
import urllib.request

import boto3
import pytest

from tests.servers.seaweedfs import running_seaweedfs, shared_seaweedfs


def test_a_server_that_is_killed_and_started_again_keeps_its_address_and_its_data():
    with running_seaweedfs() as server:
        client = boto3.client("s3", endpoint_url=server.endpoint)
        client.put_object(Bucket="store", Key="a", Body=b"kept")
        server.kill()
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(server.endpoint, timeout=5)
        server.start()
        assert client.get_object(Bucket="store", Key="a")["Body"].read() == b"kept"
        client.close()
    assert not server.folder.exists()


def test_the_shared_server_is_one():
    assert shared_seaweedfs() is shared_seaweedfs()
