"""A run on S3 is inspected and blamed as on a disk."""

import uuid
from pathlib import Path

import pytest

from infra.blame.delegations import delegations
from infra.blame.ranking import blame
from infra.inspection.report import Asked, inspect_iteration
from infra.store.runs import StoredRun, open_store, require_run
from tests.infra.store.conftest import moto_endpoint

__all__ = ["moto_endpoint"]


@pytest.fixture
def on_s3(trained: Path, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    prefix, client = uuid.uuid4().hex, boto3.client("s3", endpoint_url=moto_endpoint)
    for path in (trained / "r").rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "store", f"{prefix}/{path.relative_to(trained)}")
    return require_run(open_store(f"s3://store/{prefix}"), "r")


def test_the_same_is_read_from_s3(on_s3, trained, tmp_path):
    local = require_run(open_store(str(trained)), "r")
    for asked in (Asked(text="colour"), Asked("@1"), Asked("@1", 0, tokens=True)):
        found = [inspect_iteration(run, 0, asked).to_json() for run in (on_s3, local)]
        assert found[0] == found[1]
    ranked = [
        blame(run, "main", store="s", iteration=0, gradients=True, top=2, cache=tmp_path) for run in (on_s3, local)
    ]
    assert ranked[0] == ranked[1]
    assert ranked[0].whole.norm > 0
    changes = [delegations(run, "sub", store="s", iteration=0) for run in (on_s3, local)]
    assert changes[0] == changes[1]
