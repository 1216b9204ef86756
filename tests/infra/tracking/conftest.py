import shutil
from pathlib import Path

import pytest

from infra.tracking.mlflow_tracker import MlflowTracker, local_uri
from infra.tracking.tracker import Outcome, RunIdentity


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow SQLite file with its tables; making one takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker = MlflowTracker(local_uri(str(folder), folder), "warm-up")
    tracker.start(RunIdentity("warm-up", str(folder)), {})
    tracker.finish(Outcome.FINISHED)
    assert tracker.troubles == 0
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Path:
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return tmp_path
