"""The SQL of docs/queries.md, run on a small store of this test: every block there is run here."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import PolicyStep, commit_manifest
from infra.store.schemas import ADVANTAGES, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import read_table, table_of, write_table
from tests.infra.store import small_run

DOCUMENT = Path(__file__).parents[3] / "docs" / "queries.md"
BLOCKS = dict(re.findall(r"```sql (\w+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL))

RUN = "007"
ODD = 7  # the iteration in which things go wrong; 0 to 6 before it are alike

Columns = dict[str, list[Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StoreFiles:
    """Iterations 0 to 7, and tables of an iteration 8 that is not committed."""
    folder = tmp_path_factory.mktemp("queries")
    files = StoreFiles(str(folder / "store"))
    small_run.start_run(files, RUN, folder)
    parent = None
    for iteration in range(ODD):
        parent = small_run.write_iteration(files, RUN, iteration, folder, parent)
    tables = small_run.write_tables(files, RUN, ODD, calls=(0, 3))
    change(files, tables, "trajectories/searcher-0000.parquet", TRAJECTORIES, break_trajectories)
    change(files, tables, "rewards.parquet", REWARDS, score)
    change(files, tables, "advantages.parquet", ADVANTAGES, flatten_q1)
    steps = {}
    for policy, to_version in (("main", ODD + 1), ("sub", ODD)):  # sub stands still
        made = small_run.make_version(files, RUN, policy, to_version, folder, inputs=f"iteration {to_version - 1}")
        steps[policy] = PolicyStep(policy, ODD, to_version, made.sha256)
    commit_manifest(files, small_run.manifest(RUN, ODD, tables, steps, parent))
    small_run.write_tables(files, RUN, ODD + 1)
    return files


def change(
    files: StoreFiles, tables: dict[str, FileRef], name: str, schema: TableSchema, how: Callable[[Columns], None]
) -> None:
    columns = read_table(files, tables[name].path, schema).to_pydict()
    how(columns)
    tables[name] = write_table(files, tables[name].path, schema, table_of(schema, columns))


def break_trajectories(columns: Columns) -> None:
    """The first is lost to an outage; each makes the same mistake about another thing, the last one twice."""
    columns["status"][0] = "infra_failed"
    columns["stop_reason"][0] = "infrastructure"
    columns["failure"][0] = "search: timed out after 30 s"
    for index, turns in enumerate(columns["turns"]):
        turns[0]["error"] = f"unknown tool 'find{index}'"
    columns["turns"][-1] = columns["turns"][-1] * 2


def score(columns: Columns) -> None:
    """Main rollouts are right, wrong, right without format, lost; the first searcher has no reward."""
    mains = [row for row, agent in enumerate(columns["agent"]) if agent == "main"]
    for row, correct, form in zip(mains, (1.0, 0.0, 1.0, None), (1.0, 1.0, 0.0, None), strict=True):
        columns["correct"][row], columns["format"][row] = correct, form
    for row in (mains[-1], columns["agent"].index("searcher")):
        columns["status"][row], columns["reason"][row], columns["reward"][row] = "failed", "outage", None


def flatten_q1(columns: Columns) -> None:
    """Main's group of q1 has equal rewards of 1."""
    for row, place in enumerate(zip(columns["agent"], columns["query_id"], strict=True)):
        if place == ("main", "q1"):
            columns["group_mean"][row], columns["group_std"][row] = 1.0, 0.0


@pytest.fixture(scope="module")
def ask(store: StoreFiles) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Answers of a query of the document, by its name there."""
    with duckdb.connect() as connection:
        connection.execute("SET file_search_path = ?", [store.full(RUN)])
        connection.execute("SET threads = 1")
        connection.execute(BLOCKS["views"])

        def answers(name: str) -> list[dict[str, Any]]:
            found = connection.execute(BLOCKS[name])
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

        yield answers


def test_every_query_of_the_document_is_tested_here():
    assert set(BLOCKS) == {"views", "moved", "success", "failures", "mistakes", "calls", "flat", "lineage"}


def test_no_query_names_a_token_column():
    for sql in BLOCKS.values():
        assert not re.search(r"token_ids|loss_mask|logprobs", sql)


def test_the_trajectories_that_moved_a_version_are_those_in_its_loss(ask, store):
    rows = ask("moved")
    # Version 7 of sub is made by iteration 6. Its rollouts call the searcher 1 and 2 times in each of 2 queries; with
    # 2 slots the single call fills both (weight 2), each of the two calls one.
    assert sorted((row["query_id"], row["rollout_index"], row["agent_path"], row["weight"]) for row in rows) == [
        (query, rollout, f"main/{call}:searcher", weight)
        for query in ("q0", "q1")
        for rollout, call, weight in ((0, 0, 2.0), (1, 0, 1.0), (1, 1, 1.0))
    ]
    stored = read_table(store, layout.table_file(RUN, 6, "advantages"), ADVANTAGES).to_pylist()
    advantage_of = {row["trajectory_id"]: row["advantage"] for row in stored}
    for row in rows:
        assert row["advantage"] == advantage_of[row["trajectory_id"]]
        assert row["push"] == row["weight"] * row["advantage"]
        assert (row["task"], row["reply"]) == ("What is it?", "42")
    pushes = [abs(row["push"]) for row in rows]
    assert pushes == sorted(pushes, reverse=True)


def test_success_leaves_out_what_was_lost_and_what_is_not_committed(ask):
    rows = ask("success")
    assert [row["iteration"] for row in rows] == list(range(ODD + 1))
    # right, wrong, right without format, lost -> (1 + 0 + 0) / 3
    assert (rows[ODD]["scored"], rows[ODD]["lost"]) == (3, 1)
    assert rows[ODD]["success"] == pytest.approx(1 / 3)
    assert rows[0]["success"] is None  # nothing was judged there


def test_failures_come_with_who_failed_and_why(ask):
    rows = ask("failures")
    assert {row["iteration"] for row in rows} == {ODD}
    told = [(row["agent"], row["status"], row["failure"], row["reward_status"], row["reason"]) for row in rows]
    assert told == [
        ("main", "ok", None, "failed", "outage"),
        ("searcher", "infra_failed", "search: timed out after 30 s", "failed", "outage"),
    ]


def test_one_mistake_about_several_things_is_one_mistake(ask):
    (row,) = ask("mistakes")
    assert row["mistake"] == "unknown tool …"
    assert (row["times"], row["trajectories"]) == (7, 6)  # 3 calls in each of 2 queries, one of them with it twice
    assert (row["first_seen"], row["last_seen"]) == (ODD, ODD)


def test_rollouts_without_a_call_are_counted(ask):
    rows = ask("calls")
    assert [(row["calls"], row["rollouts"]) for row in rows if row["iteration"] == 0] == [(1, 2), (2, 2)]
    assert [(row["calls"], row["rollouts"]) for row in rows if row["iteration"] == ODD] == [(0, 2), (3, 2)]


def test_groups_of_equal_rewards_are_found(ask):
    assert ask("flat") == [{"agent": "main", "query_id": "q1", "flat_groups": 1, "easy": 1, "last_seen": ODD}]


def test_a_trajectory_is_traced_to_its_versions_and_slots(ask, store):
    rows = ask("lineage")
    newest = max(
        trajectory.trajectory_id
        for iteration in range(ODD + 1)
        for query in small_run.QUERIES_OF_AN_ITERATION
        for rollout in small_run.rollouts(RUN, iteration, query, (0, 3) if iteration == ODD else (1, 2))
        for trajectory in rollout.trajectories
    )
    iteration = rows[0]["iteration"]
    stored = read_table(store, layout.table_file(RUN, iteration, "advantages"), ADVANTAGES).to_pylist()
    (weight,) = [row["weight"] for row in stored if row["trajectory_id"] == newest]
    assert sum(row["weight"] or 0.0 for row in rows) == weight
    assert {row["policy_version"] for row in rows} == {iteration}
