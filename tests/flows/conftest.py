"""A small team, its config, and the command `mgrpo` against the test session's Prefect server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.program import Program, preload
from tests.flows.small_team import config_of, save_config, save_policies, save_queries


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the team's policies, its queries.jsonl, and its config, run.yaml."""
    folder = save_policies(tmp_path_factory.mktemp("team"))
    queries = save_queries(folder / "queries.jsonl")
    save_config(folder / "run.yaml", config_of(folder, queries))
    return folder


@pytest.fixture(scope="session")
def program(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The command `mgrpo`, in processes of its own."""
    preload()
    return Program(prefect_server, tmp_path_factory.mktemp("output"))
