"""A run to export, written once; what tests ask of a store."""

from pathlib import Path
from typing import Any

import pytest

from infra.store.files import StoreFiles
from infra.store.runs import StoredRun
from infra.store.verify import verify_run
from tests.infra.store import small_run
from tests.infra.store.conftest import moto_endpoint, s3_url

__all__ = ["ITERATIONS", "content", "moto_endpoint", "s3_url", "store", "verified"]

ITERATIONS = 3


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations. Nobody may change it."""
    folder = tmp_path_factory.mktemp("export")
    small_run.write_run(StoreFiles(str(folder / "store")), "r", folder, ITERATIONS)
    return folder / "store"


def content(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def verified(store: Path) -> Any:
    return verify_run(StoredRun(StoreFiles(str(store)), "r"))
