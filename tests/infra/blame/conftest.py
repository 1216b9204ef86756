"""The run that is blamed."""

from pathlib import Path

import pytest

from infra.store.runs import StoredRun, open_store, require_run


@pytest.fixture(scope="session")
def run(trained: Path) -> StoredRun:
    return require_run(open_store(str(trained)), "r")
