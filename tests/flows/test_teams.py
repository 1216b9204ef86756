"""Teams of other shapes: a frozen agent, three levels with a shared policy, a sub-agent that nobody asks."""

from pathlib import Path
from typing import Any

import pytest

from tests.flows.program import Ended, Program
from tests.flows.small_team import BLUE, RED, ask, config_of, save_config, save_policy
from tests.flows.stored import manifest_of, metrics_of, rows_of, versions_of


@pytest.fixture
def config(team: Path) -> dict[str, Any]:
    return config_of(team, team / "queries.jsonl")


@pytest.fixture(scope="session")
def delegating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that asks the reader in half of its turns, whoever acts with it."""
    return save_policy(tmp_path_factory.mktemp("delegating") / "sub", {ask("reader"): 0.5, RED: 0.3, BLUE: 0.2}, seed=6)


def _train(program: Program, config: dict[str, Any], folder: Path) -> Ended:
    ended = program.run("train", save_config(folder / "run.yaml", config), "--run", "r", "--store", folder / "store")
    assert ended.code == 0, ended.err
    return ended


def test_a_frozen_agent_s_policy_keeps_its_version_and_the_other_s_advances(program, config, tmp_path):
    config["agents"]["main"]["trainable"] = False
    _train(program, config, tmp_path)

    store = tmp_path / "store"
    assert versions_of(store, "main") == ["00000000"]
    assert versions_of(store, "sub") == ["00000000", "00000001"]
    steps = manifest_of(store)["policies"]
    assert (steps["main"]["to_version"], steps["sub"]["to_version"]) == (0, 1)
    scored = [row for row in rows_of(store, "rewards") if row["agent"] == "main"]
    assert len(scored) == 8
    assert all(row["reward"] is not None for row in scored)
    assert "update/main/loss" not in metrics_of(store)


def test_three_levels_with_a_shared_policy_run_an_iteration_and_each_agent_has_groups_of_its_own(
    program, config, delegating, tmp_path
):
    searcher = config["agents"]["searcher"]
    config["policies"]["sub"]["init"] = str(delegating)
    config["agents"]["reader"] = dict(searcher) | {"description": "Reads colours."}
    searcher["delegates"] = ["reader"]
    _train(program, config, tmp_path)

    store = tmp_path / "store"
    by_id = {row["trajectory_id"]: row for row in rows_of(store, "rewards")}
    readers = [row for row in by_id.values() if row["agent"] == "reader"]
    assert {by_id[row["parent_id"]]["agent"] for row in readers} == {"searcher"}
    depths = {
        agent: {row["depth"] for row in rows_of(store, f"trajectories/{agent}-0000")} for agent in config["agents"]
    }
    assert depths == {"main": {0}, "searcher": {1}, "reader": {2}}
    credit = rows_of(store, "advantages")
    for agent in ("searcher", "reader"):
        for query in {row["query_id"] for row in credit}:
            group = [row for row in credit if (row["agent"], row["query_id"]) == (agent, query)]
            total = sum(row["weight"] * row["advantage"] for row in group)
            assert total == pytest.approx(0, abs=1e-6), "a group of two agents would not be centred for each"
    trained = {row["agent"] for row in credit if row["policy"] == "sub" and row["included"]}
    assert trained == {"searcher", "reader"}
    assert metrics_of(store)["update/sub/trajectories"] == sum(
        row["included"] for row in credit if row["policy"] == "sub"
    )
    # case D10: the reader has nobody to ask; its call is answered with an error and makes no row
    refused = [turn for row in rows_of(store, "trajectories/reader-0000") for turn in row["turns"] if turn["error"]]
    assert any('Unknown name "reader". Known: none' in turn["error"] for turn in refused)


# case D1, one of two sub-agents without a trajectory
def test_a_sub_agent_that_nobody_asks_is_no_obstacle_for_the_one_that_is_asked(program, config, tmp_path):
    config["agents"]["reader"] = dict(config["agents"]["searcher"]) | {"policy": "reader"}
    config["policies"]["reader"] = dict(config["policies"]["sub"])
    config["agents"]["main"]["delegates"] = ["searcher", "reader"]
    _train(program, config, tmp_path)

    store = tmp_path / "store"
    assert rows_of(store, "trajectories/reader-0000") == []
    assert versions_of(store, "reader") == ["00000000"]
    assert versions_of(store, "sub") == ["00000000", "00000001"]
