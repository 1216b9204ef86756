"""A real run for tests that read one: a small team, two iterations, both policies updated. Nobody may change it.

What its questions say would steer a terminal, a page or a markup: readers show it, and nothing more.
"""

import json
from pathlib import Path

import pytest

from tests.flows.conftest import program, team
from tests.flows.program import Program
from tests.flows.small_team import config_of, save_config

__all__ = ["HOSTILE", "program", "team"]

HOSTILE = "\x1b[2J\x1b]8;;http://x\x07[bold red]<script>alert(1)</script>[/]\u202e\x9b31m"


@pytest.fixture(scope="session")
def trained(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store; its run is `r`."""
    folder = tmp_path_factory.mktemp("trained")
    queries = folder / "queries.jsonl"
    lines = [
        {"id": f"q{number}{HOSTILE}", "question": f"Which colour? {HOSTILE}", "answer": ("red", "blue")[number % 2]}
        for number in range(6)
    ]
    queries.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    config = save_config(folder / "run.yaml", config_of(team, queries))
    ended = program.run("train", config, "--run", "r", "--store", folder, "--iterations", 2)
    assert ended.code == 0, ended.err
    return folder
