"""The SQL of docs/queries.md, run on a small store of this test: every block there is run here."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
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


Ask = Callable[[str], list[dict[str, Any]]]


@contextmanager
def asking(folder: str) -> Iterator[Ask]:
    """Answers of a query of the document, by its name there, from a run's folder."""
    with duckdb.connect() as connection:
        connection.execute("SET file_search_path = ?", [folder])
        connection.execute("SET threads = 1")
        connection.execute(BLOCKS["views"])
        yield lambda name: answers(connection, BLOCKS[name])


def answers(connection: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    found = connection.execute(sql)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@pytest.fixture(scope="module")
def ask(store: StoreFiles) -> Iterator[Ask]:
    with asking(store.full(RUN)) as asked:
        yield asked


@pytest.fixture(scope="module")
def ask_trained(trained: Path) -> Iterator[Ask]:
    """The same of a real run."""
    with asking(str(trained / "r")) as asked:
        yield asked


def test_every_query_of_the_document_is_tested_here():
    assert set(BLOCKS) == {
        *("views", "success", "samples", "moved", "components", "sources", "flat", "pass_at_k", "lengths", "tools"),
        *("mistakes", "failures", "calls", "lineage"),
    }


def test_each_of_the_ten_questions_names_where_it_was_asked():
    text = DOCUMENT.read_text(encoding="utf-8")
    questions = re.findall(r"^## (\d+)\. .*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert [int(number) for number in questions] == list(range(1, 11))
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if part[0].isdigit():
            assert re.search(r"Asked in [\w./-]+#\d+", part), part.splitlines()[0]


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


def test_samples_of_a_query_come_rollout_by_rollout_main_first(ask):
    rows = [row for row in ask("samples") if row["iteration"] == 0]
    assert [(row["rollout_index"], row["agent_path"]) for row in rows] == [
        (0, "main"), (0, "main/0:searcher"), (1, "main"), (1, "main/0:searcher"), (1, "main/1:searcher"),
    ]  # fmt: skip
    assert rows[0]["said"] == ["user: What is it?", "assistant: 42"]
    assert all(row["advantage"] == 2 * row["reward"] - 1 for row in rows)


def test_a_part_that_was_never_graded_is_null_and_not_0(ask):
    rows = {(row["iteration"], row["agent"]): row for row in ask("components")}
    assert rows[0, "main"]["format"] == 1.0
    assert rows[0, "main"]["correct"] is None
    # right, wrong, right without format, lost -> (1 + 0 + 1) / 3 of those that have the part
    assert rows[ODD, "main"]["correct"] == pytest.approx(2 / 3)
    assert rows[ODD, "main"]["scored"] == 3


def test_a_query_without_a_source_is_one_of_its_own(ask):
    rows = ask("sources")
    assert {row["source"] for row in rows} == {"(none)"}
    assert [(row["queries"], row["rollouts"]) for row in rows if row["iteration"] == 0] == [(2, 4)]


def test_pass_at_k_is_the_unbiased_estimate(ask):
    rows = {(row["iteration"], row["k"]): row for row in ask("pass_at_k")}
    # q0: right, wrong: n 2, c 1; q1: right without format, and one that was lost: n 1, c 0.
    assert (rows[ODD, 1]["queries"], rows[ODD, 1]["pass_at_k"]) == (2, pytest.approx((1 / 2 + 0) / 2))
    assert (rows[ODD, 2]["queries"], rows[ODD, 2]["pass_at_k"]) == (1, 1.0)
    assert (ODD, 4) not in rows


def test_lengths_are_of_sampled_tokens(ask):
    rows = {(row["iteration"], row["agent"]): row for row in ask("lengths")}
    assert rows[0, "searcher"] == {
        "iteration": 0, "agent": "searcher", "trajectories": 6, "turns": 1.0, "tokens": 5.0, "median": 5.0,
        "longest": 5, "cut": 0, "out_of_turns": 0,
    }  # fmt: skip


def rows_of(store: Path, pattern: str) -> list[dict[str, Any]]:
    """Rows of every table of that name, with the iteration that they are of."""
    found = []
    for path in sorted((store / "r" / "iterations").glob(f"*/{pattern}.parquet")):
        iteration = int(path.relative_to(store / "r" / "iterations").parts[0])
        found += [{"iteration": iteration, **row} for row in pq.read_table(path).to_pylist()]
    return found


def test_a_real_runs_answers_are_what_a_plain_loop_over_its_rows_finds(ask_trained, trained):
    trajectories, rewards = rows_of(trained, "trajectories/*"), rows_of(trained, "rewards")
    assert {row["iteration"] for row in rewards} == {0, 1}

    attempts: dict[tuple[int, int], list[bool]] = {}
    for row in rewards:
        if row["parent_id"] is None and row["status"] == "scored":
            attempts.setdefault((row["iteration"], row["query_position"]), []).append(
                row["correct"] * row["format"] >= 1
            )
    for row in ask_trained("pass_at_k"):
        groups = [one for (iteration, _), one in attempts.items() if iteration == row["iteration"]]
        expected = [
            1 - math.comb(len(one) - sum(one), row["k"]) / math.comb(len(one), row["k"])
            for one in groups
            if len(one) >= row["k"]
        ]
        assert (row["queries"], row["pass_at_k"]) == (len(expected), pytest.approx(sum(expected) / len(expected)))

    for row in ask_trained("components"):
        own = [one for one in rewards if (one["iteration"], one["agent"]) == (row["iteration"], row["agent"])]
        for part in ("reward", "format", "correct", "main_correct", "expert"):
            values = [one[part] for one in own if one[part] is not None]
            assert row[part] == (pytest.approx(sum(values) / len(values)) if values else None)

    for row in ask_trained("lengths"):
        own = [one for one in trajectories if (one["iteration"], one["agent"]) == (row["iteration"], row["agent"])]
        sampled = [sum(one["loss_mask"]) for one in own]
        assert (row["trajectories"], row["longest"]) == (len(own), max(sampled))
        assert row["tokens"] == pytest.approx(sum(sampled) / len(sampled))
        assert row["turns"] == pytest.approx(sum(len(one["turns"]) for one in own) / len(own))

    calls = Counter(
        (one["iteration"], one["agent"], turn["action_name"])
        for one in trajectories
        for turn in one["turns"]
        if turn["action_name"] is not None
    )
    found = Counter[tuple[int, str, str]]()
    for row in ask_trained("tools"):
        found[row["iteration"], row["agent"], row["name"]] += row["calls"]
    assert found == calls
    assert calls

    counted = Counter((row["iteration"], row["agent"], row["calls"]) for row in ask_trained("calls"))
    assert set(counted.values()) == {1}
    invocations = sum(row["calls"] * row["rollouts"] for row in ask_trained("calls"))
    assert invocations == sum(1 for one in trajectories if one["depth"] > 0)

    samples = ask_trained("samples")
    first = min(one["query_id"] for one in trajectories)
    assert len(samples) == sum(1 for one in trajectories if one["query_id"] == first)
    for name in BLOCKS.keys() - {"views"}:
        ask_trained(name)


def test_a_run_on_object_storage_is_asked_through_fsspec(store, s3_url):
    target = s3_url
    remote = StoreFiles(target)
    for path in store.files_below(RUN):
        if "/iterations/0000000" in path and not path.endswith("00000008"):
            remote.upload(Path(store.full(path)), path)
    (code,) = re.findall(r"```python s3\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    code = code.replace("s3://bucket/prefix/<run>", f"{target}/{RUN}").replace(
        'open("views.sql").read()', repr(BLOCKS["views"])
    )
    names: dict[str, Any] = {}
    exec(code, names)
    with names["con"] as connection:
        assert [row["iteration"] for row in answers(connection, BLOCKS["success"])] == list(range(ODD + 1))
        assert answers(connection, BLOCKS["failures"])
