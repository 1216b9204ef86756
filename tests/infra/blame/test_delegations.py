"""What an invocation does to the others: the run's own tables, made again without it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from infra.blame.delegations import delegation_credit, delegations
from infra.blame.render import render_delegations
from infra.credit.advantages import advantages_table
from infra.credit.alignment import alignment_table
from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.schemas import ADVANTAGES, QUERIES, REWARDS
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.store.tables import table_of, write_table
from mgrpo_core.config import RunConfig
from mgrpo_core.trajectories import PathStep, TrajectoryKey
from tests.flows.small_team import config_of
from tests.infra.store.small_run import manifest


@pytest.fixture(scope="module")
def stored(run) -> StoredIteration:
    return open_stored(run, 0)


SETTINGS = [
    {},
    {"alignment": {"mode": "weighted"}},
    {"alignment": {"mode": "none"}, "advantage": {"normalization": "batch_std"}},
    {"advantage": {"normalization": "leave_one_out"}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_change_is_that_of_the_runs_own_tables_without_the_row(stored, settings):
    config = RunConfig.model_validate(stored.config.model_dump() | settings)
    found, as_stored = delegation_credit(replace(stored, config=config), ["searcher"])
    assert as_stored == (not settings)
    assert len(found) > 4
    before = credit_without(stored, config, [])
    for one in found:
        _check(one.change, before, credit_without(stored, config, [one.trajectory_id]), one)
    assert any(one.change.mean_change > 0 for one in found)


def credit_without(stored: StoredIteration, config: RunConfig, gone: list[str]) -> dict[str, dict]:
    """Rows of the advantages table by trajectory, the rewards of some never having been."""
    rewards = stored.table("rewards").to_pylist()
    kept = pa.Table.from_pylist([row for row in rewards if row["trajectory_id"] not in gone], REWARDS.columns)
    query_ids = stored.table("queries", ["query_id"]).column(0).to_pylist()
    slots = alignment_table(config, stored.manifest.iteration, query_ids, kept)
    return {row["trajectory_id"]: row for row in advantages_table(config, kept, slots).to_pylist()}


def _check(change, before, after, one) -> None:
    others = [key for key, row in after.items() if row["query_id"] == one.query_id and row["agent"] in touched(one)]
    others = [key for key in others if before[key]["reward"] is not None]
    assert change.others == len(others)
    gaps = [after[key]["advantage"] - before[key]["advantage"] for key in others]
    pulls = [after[k]["advantage"] * after[k]["weight"] - before[k]["advantage"] * before[k]["weight"] for k in others]
    assert change.mean_change == pytest.approx(np.abs(gaps).mean() if gaps else 0, abs=1e-9)
    assert abs(change.largest_change) == pytest.approx(max(map(abs, gaps), default=0), abs=1e-9)
    assert change.mean_pull_change == pytest.approx(np.abs(pulls).mean() if pulls else 0, abs=1e-9)
    assert change.sign_changes == sum(after[k]["advantage"] * before[k]["advantage"] < 0 for k in others)
    assert change.lost == sum(before[k]["included"] and not after[k]["included"] for k in others)
    assert change.gained == sum(after[k]["included"] and not before[k]["included"] for k in others)


def touched(one) -> set[str]:
    return {"searcher", "reader"} if one.below else {one.agent}


def test_one_query_alone_gives_the_same(stored):
    every, _ = delegation_credit(stored, ["searcher"])
    some, _ = delegation_credit(stored, ["searcher"], position=1)
    assert some == [one for one in every if one.query_position == 1]
    assert some


def test_what_was_delegated_under_an_invocation_goes_with_it(tmp_path):
    """main -> searcher -> reader: without the searcher's call its readers' group loses them too."""
    stored = three_levels(StoreFiles(str(tmp_path)))
    found, _ = delegation_credit(stored, ["searcher"])
    calls = {(one.rollout_index, one.call_index): one for one in found}
    assert {key: one.below for key, one in calls.items()} == {(0, 0): 2, (0, 1): 0, (1, 0): 1, (1, 1): 1}
    before = credit_without(stored, stored.config, [])
    paths = {row["trajectory_id"]: row for row in stored.table("rewards").to_pylist()}
    for one in found:
        gone = [
            key
            for key, row in paths.items()
            if row["rollout_index"] == one.rollout_index and (row["agent_path"] + "/").startswith(one.agent_path + "/")
        ]
        assert len(gone) == one.below + 1
        _check(one.change, before, credit_without(stored, stored.config, gone), one)


def test_one_without_a_reward_is_in_no_group(tmp_path):
    stored = three_levels(StoreFiles(str(tmp_path)), failed=("main/1:searcher", 0))
    found, _ = delegation_credit(stored, ["searcher"])
    (one,) = [one for one in found if one.status == "failed"]
    assert (one.change.others, one.pull, one.reward) == (0, 0, None)


def three_levels(files: StoreFiles, failed: tuple[str, int] | None = None) -> StoredIteration:
    """Two rollouts of a query: two calls of the searcher each, and some of the reader under them."""
    raw = config_of(tmp := files_root(files), tmp / "q.jsonl")
    reader = {**raw["agents"]["searcher"], "d": 3}
    raw["agents"] = {
        "main": raw["agents"]["main"],
        "searcher": {**raw["agents"]["searcher"], "delegates": ["reader"]},
        "reader": reader,
    }
    raw["rollout"] = {"queries_per_iteration": 1, "rollouts_per_query": 2}
    config = RunConfig.model_validate(raw)
    rows, rng = [], np.random.default_rng(0)
    for rollout, readers in enumerate([(2, 0), (1, 1)]):
        head = TrajectoryKey("r", 0, "q", rollout, (PathStep("main", 0),))
        keys = [head]
        for call, count in enumerate(readers):
            keys.append(head.child("searcher", call))
            keys += [keys[-1].child("reader", deeper) for deeper in range(count)]
        for key in keys:
            lost = (key.agent_path, rollout) == failed
            rows.append(_reward_row(key, None if lost else round(float(rng.random()), 1)))
    rewards = pa.Table.from_pylist(rows, REWARDS.columns)
    slots = alignment_table(config, 0, ["q"], rewards)
    columns = {
        "position": [0], "query_id": ["q"], "question": ["?"], "answers": [["!"]], "metadata_json": ["{}"], "epoch": [0]
    }  # fmt: skip
    tables = {
        "queries": (QUERIES, columns),
        "rewards": (REWARDS, rewards.to_pydict()),
        "advantages": (ADVANTAGES, advantages_table(config, rewards, slots).to_pydict()),
    }
    refs = {
        f"{name}.parquet": write_table(files, layout.table_file("r", 0, name), schema, table_of(schema, values))
        for name, (schema, values) in tables.items()
    }
    return StoredIteration(files, manifest("r", 0, refs, {}), config)


def files_root(files: StoreFiles):
    from pathlib import Path

    return Path(files.url)


def _reward_row(key: TrajectoryKey, reward: float | None) -> dict:
    return {
        "trajectory_id": key.trajectory_id,
        "parent_id": key.parent.trajectory_id if key.parent else None,
        "agent": key.agent,
        "query_position": 0,
        "query_id": key.query_id,
        "rollout_index": key.rollout_index,
        "agent_path": key.agent_path,
        "call_index": key.call_index,
        "status": "failed" if reward is None else "scored",
        "reward": reward,
        "format_weight": 1.0,
    }


def test_they_are_ranked_and_shown(run, trained, capsys):
    report = delegations(run, "sub", store=str(trained), iteration=0, top=3)
    changes = [one.change.mean_change for one in report.ranked]
    assert changes == sorted(changes, reverse=True)
    assert len(changes) == 3 < report.invocations
    render_delegations(report, Console(width=120))
    shown = capsys.readouterr().out
    assert "Alignment is random" in shown
    assert report.ranked[0].trajectory_id[:8] in shown
    assert "mgrpo replay" not in shown
    render_delegations(replace(report, as_stored=False), Console(width=120))
    assert "mgrpo replay" in capsys.readouterr().out
