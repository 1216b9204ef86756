"""What every test stands on: one thread, no network, no account, no trace in the user's home, one Prefect server."""

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

_HOME = Path(tempfile.mkdtemp(prefix="mgrpo-tests-"))
# Registered first, so run last: whoever imports us later still writes there at its own exit.
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)

# Set before anything imports torch, transformers, prefect, mlflow or botocore: they read these once. Processes that
# tests start inherit them.
os.environ |= {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "DO_NOT_TRACK": "1",
    "HF_HOME": str(_HOME / "huggingface"),
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "PREFECT_HOME": str(_HOME / "prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "XDG_CACHE_HOME": str(_HOME / "cache"),
    "XDG_CONFIG_HOME": str(_HOME / "config"),
}
for _name in (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "MGRPO_STORE",
    "MLFLOW_TRACKING_URI",
    "PREFECT_API_KEY",
    "PREFECT_API_URL",
    "PREFECT_PROFILE",
):
    os.environ.pop(_name, None)

DEPLOYMENT = "tests/pools/"

# No deadline: the cores may be shared. In continuous integration the examples are the same every time.
settings.register_profile("person", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "person")


def pytest_unconfigure() -> None:
    # A thread that gives up on a dead server outlives its test, and may log to a stream that pytest has closed.
    logging.raiseExceptions = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """With `-n`, a file's tests share a process, as its fixtures want; those on a whole deployment share one."""
    config.option.loadscopereorder = False
    return _ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, what takes longest begins first, or one process would end minutes after the other."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(DEPLOYMENT))


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return DEPLOYMENT if nodeid.startswith(DEPLOYMENT) else nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """A Prefect server of this test session, on which every flow and task run lands. Gives its API's URL."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())
