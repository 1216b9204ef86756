"""What is missing is left out of statistics and loss, told, and never taken for a zero (cases A5, A7, D1, D5, D6)."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from infra.store.schemas import TRAJECTORIES
from tests.flows.program import Ended, Program
from tests.flows.small_team import BLUE, RED, ask, config_of, save_config, save_policy
from tests.flows.stored import iteration_folder, manifest_of, metrics_of, rows_of, versions_of

CALLS_LOOKUP = '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>'


@pytest.fixture
def config(team: Path) -> dict[str, Any]:
    return config_of(team, team / "queries.jsonl")


@pytest.fixture(scope="session")
def odd_policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`alone` never delegates, `always` does so first in nine of ten, `looks_up` calls its tool in one of three."""
    folder = tmp_path_factory.mktemp("odd")
    save_policy(folder / "alone", {RED: 0.5, BLUE: 0.5}, seed=3)
    save_policy(folder / "always", {ask("searcher"): 0.9, RED: 0.05, BLUE: 0.05}, seed=4)
    save_policy(folder / "looks_up", {CALLS_LOOKUP: 0.34, RED: 0.33, BLUE: 0.33}, seed=5)
    return folder


def _train(program: Program, config: dict[str, Any], folder: Path) -> Ended:
    return program.run("train", save_config(folder / "run.yaml", config), "--run", "r", "--store", folder / "store")


def test_d1_without_any_delegation_main_is_trained_and_the_sub_policy_stays_as_it_is(
    program, config, odd_policies, tmp_path
):
    config["policies"]["main"]["init"] = str(odd_policies / "alone")
    ended = _train(program, config, tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    table = pq.read_table(iteration_folder(store) / "trajectories/searcher-0000.parquet")
    assert table.num_rows == 0
    assert table.schema.equals(TRAJECTORIES.columns)
    assert versions_of(store, "sub") == ["00000000"]
    assert versions_of(store, "main") == ["00000000", "00000001"]
    sub = manifest_of(store)["policies"]["sub"]
    assert (sub["from_version"], sub["to_version"]) == (0, 0)
    metrics = metrics_of(store)
    assert metrics["searcher/trajectories"] == 0
    assert metrics["searcher/rollouts_without"] == 1
    assert metrics["update/sub/optimizer_steps"] == 0
    assert metrics["update/main/optimizer_steps"] == 1


def test_d5_an_iteration_that_lost_too_many_rollouts_to_an_outage_is_not_trained_on(
    program, config, odd_policies, tmp_path
):
    config["policies"]["main"]["init"] = str(odd_policies / "always")
    config["policies"]["sub"]["init"] = str(odd_policies / "looks_up")
    config["agents"]["searcher"]["tools"] = ["tests.flows.faulty:lookup_down"]
    config["rollout"]["min_scored_share"] = 0.9
    ended = _train(program, config, tmp_path)

    assert ended.code == 1
    assert "IncompleteIterationError: r-0000: " in ended.err
    assert "of 8 rollouts ended by an infrastructure failure" in ended.err
    assert "tool lookup: the index is being rebuilt" in ended.err
    store = tmp_path / "store"
    assert not (iteration_folder(store) / "manifest.json").exists()
    assert versions_of(store, "main") == versions_of(store, "sub") == ["00000000"]


def test_d6_one_outage_takes_one_rollout_out_of_both_groups_and_its_row_and_reason_stay(
    program, config, odd_policies, tmp_path
):
    config["policies"]["sub"]["init"] = str(odd_policies / "looks_up")
    config["agents"]["searcher"]["tools"] = ["tests.flows.faulty:lookup_down_once"]
    ended = _train(program, config, tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    for agent in ("main", "searcher"):
        failed = [row for row in rows_of(store, f"trajectories/{agent}-0000") if row["status"] == "infra_failed"]
        assert len(failed) == 1
        assert "the index is being rebuilt" in failed[0]["failure"]
        lost = failed[0]["trajectory_id"]
        rewards = {row["trajectory_id"]: row for row in rows_of(store, "rewards") if row["agent"] == agent}
        assert rewards[lost]["reward"] is None
        assert "the index is being rebuilt" in rewards[lost]["reason"]
        group = [
            row
            for row in rows_of(store, "advantages")
            if row["agent"] == agent and row["query_id"] == failed[0]["query_id"]
        ]
        credit = {row["trajectory_id"]: row for row in group}
        assert not credit[lost]["included"]
        assert credit[lost]["advantage"] == 0
        present = [row for row in group if row["reward"] is not None]
        weights = [row["weight"] for row in present]
        assert present[0]["group_mean"] == pytest.approx(
            np.average([row["reward"] for row in present], weights=weights)
        )
        assert metrics_of(store)[f"{agent}/infra_failed"] == 1


# cases A5, A7
def test_a5_a_judge_that_fails_leaves_its_trajectories_unscored_and_they_are_counted(program, config, tmp_path):
    config["agents"]["searcher"] |= {
        "judge": "tests.flows.faulty:blue_is_unreadable",
        "reward": {"format": 0.1, "main_correct": 0.4, "expert": 0.5},
    }
    ended = _train(program, config, tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    said = {row["trajectory_id"]: row["reply"] for row in rows_of(store, "trajectories/searcher-0000")}
    rewards = [row for row in rows_of(store, "rewards") if row["agent"] == "searcher"]
    unscored = {row["trajectory_id"] for row in rewards if row["reward"] is None}
    assert unscored == {one for one, reply in said.items() if reply == "blue"} != set()
    assert all("503" in row["reason"] and row["expert"] is None for row in rewards if row["reward"] is None)
    credit = [row for row in rows_of(store, "advantages") if row["agent"] == "searcher"]
    assert not any(row["included"] for row in credit if row["trajectory_id"] in unscored)
    for query in {row["query_id"] for row in credit}:
        present = [row for row in credit if row["query_id"] == query and row["reward"] is not None]
        weights = [row["weight"] for row in present]
        expected = np.average([row["reward"] for row in present], weights=weights)
        assert present[0]["group_mean"] == pytest.approx(expected)
    metrics = metrics_of(store)
    assert metrics["searcher/reward_missing"] == len(unscored)
    assert metrics["main/reward_missing"] == 0
    assert metrics["update/sub/trajectories"] == sum(row["included"] for row in credit)


# case A14: what was cut off by its own budget is neither masked nor dropped; it scores 0 among its siblings
def test_a_trajectory_that_used_up_its_budget_counts_in_its_group_with_a_reward_of_0(program, config, tmp_path):
    config["agents"]["main"]["limits"]["max_turns"] = 2
    ended = _train(program, config, tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    failed = {
        row["trajectory_id"] for row in rows_of(store, "trajectories/main-0000") if row["status"] == "policy_failed"
    }
    credit = [row for row in rows_of(store, "advantages") if row["agent"] == "main"]
    assert failed
    assert {row["reward"] for row in credit if row["trajectory_id"] in failed} == {0.0}
    assert {row["group_size"] for row in credit} == {4}
    for query in {row["query_id"] for row in credit}:
        group = [row for row in credit if row["query_id"] == query]
        assert group[0]["group_mean"] == pytest.approx(np.mean([row["reward"] for row in group]))
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-6)
