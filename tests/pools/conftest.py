"""One set of services for all tests of work pools: they take a minute to start."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.deploy.local.services import Services, local_services
from infra.deploy.local.settings import LocalSettings, Ports
from tests.pools.cluster import POOLS, Cluster, deployed


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """Prefect server on PostgreSQL, SeaweedFS, and a worker a pool."""
    home = Path(tempfile.mkdtemp(prefix="mgrpo-pools-"))
    home.chmod(0o755)  # PostgreSQL may run as another user, who must get in
    settings = LocalSettings(services=("server", "s3"), pools=POOLS, ports=Ports(0, 0, 0, 0))
    with local_services(home / "up", settings) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def cluster(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A run of its own on them."""
    for name, value in services.environment.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return deployed(services, tmp_path)
