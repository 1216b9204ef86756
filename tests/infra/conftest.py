"""A real run for tests that read one: a small team, two iterations, both policies updated. Nobody may change it."""

from pathlib import Path

import pytest

from tests.flows.conftest import program, team
from tests.flows.program import Program
from tests.flows.small_team import config_of, save_config

__all__ = ["program", "team"]


@pytest.fixture(scope="session")
def trained(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store; its run is `r`."""
    folder = tmp_path_factory.mktemp("trained")
    config = save_config(folder / "run.yaml", config_of(team, team / "queries.jsonl"))
    ended = program.run("train", config, "--run", "r", "--store", folder, "--iterations", 2)
    assert ended.code == 0, ended.err
    return folder
