"""vLLM for tests on real servers (the files `test_real_*.py`): skipped without it, but not under `make test-vllm`."""

import os
from pathlib import Path

import pytest

from infra.serving.vllm.build import DEFAULT_PYTHON, PYTHON_VARIABLE, VllmBuild, find_build
from mgrpo_core.errors import ConfigError

REQUIRED = "MGRPO_TEST_VLLM"
_ROOT = Path(__file__).parents[2]


def vllm_build(servers: int = 1) -> VllmBuild:
    """The environment that `make vllm` has made, or the one that MGRPO_VLLM_PYTHON names.

    Args:
        servers: how many share this machine.
    """
    try:
        return find_build(os.environ.get(PYTHON_VARIABLE) or _ROOT / DEFAULT_PYTHON, servers=servers)
    except ConfigError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(f"no vLLM to test against: {error}")
