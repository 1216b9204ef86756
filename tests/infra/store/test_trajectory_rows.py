from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.files import StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import read_table, write_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, list_arrays, trajectories_of, trajectories_table
from mgrpo_core.trajectories import Message, PathStep, Status, StopReason, Trajectory, TrajectoryKey, Turn
from tests.infra.store.small_run import trajectory

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ANY_TEXT = st.text(max_size=20)  # lone surrogates among it
COUNT = st.integers(0, 2**31 - 1)
NAME = st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True)
KEY = TrajectoryKey("r", 3, "q0", 1, (PathStep("main", 0),))


def turns(text: st.SearchStrategy[str]) -> st.SearchStrategy[Turn]:
    return st.builds(
        Turn,
        start=COUNT,
        stop=COUNT,
        finish_reason=st.sampled_from(["stop", "length"]),
        policy_version=COUNT,
        seed=st.integers(0, 2**63 - 1),
        action=st.sampled_from(["tool", "delegate", "answer", "invalid"]),
        action_name=st.none() | text,
        arguments_json=st.none() | text,
        error=st.none() | text,
        observation_tokens=COUNT,
        observation_chars=COUNT,
        observation_cut=st.booleans(),
    )


@st.composite
def trajectories(draw, text=TEXT) -> Trajectory:
    tokens = draw(st.integers(0, 12))
    path = [PathStep("main", 0), *draw(st.lists(st.builds(PathStep, NAME, st.integers(0, 300)), max_size=3))]
    logprob = st.floats(-50, 0, width=32) | st.just(float("nan"))
    return Trajectory(
        key=TrajectoryKey("007", draw(COUNT), draw(TEXT), draw(COUNT), tuple(path)),
        policy=draw(NAME),
        token_ids=np.array(draw(st.lists(COUNT, min_size=tokens, max_size=tokens)), dtype=np.int32),
        loss_mask=np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=np.bool_),
        logprobs=np.array(draw(st.lists(logprob, min_size=tokens, max_size=tokens)), dtype=np.float32),
        segment_starts=tuple(draw(st.lists(COUNT, max_size=3))),
        turns=tuple(draw(st.lists(turns(text), max_size=3))),
        messages=tuple(
            draw(st.lists(st.builds(Message, st.sampled_from(["user", "tool"]), text, st.none() | text), max_size=3))
        ),
        task=draw(text),
        reply=draw(st.none() | text),
        temperature=draw(st.floats(0, 2)),
        status=draw(st.sampled_from(Status)),
        stop_reason=draw(st.sampled_from(StopReason)),
        failure=draw(st.none() | text),
    )


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in fields(Trajectory):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert other.dtype == one.dtype
            np.testing.assert_array_equal(one, other)  # NaN equals NaN here
        else:
            assert one == other, field.name
            assert type(one) is type(other), field.name


@settings(max_examples=40)
@given(st.lists(trajectories(), max_size=4))
def test_a_trajectory_comes_back_from_its_file_exactly(made):  # cases E6, E16, E18
    files = StoreFiles("memory://round-trip")
    table = trajectories_table([(7, one) for one in made])
    write_table(files, "r/t.parquet", TRAJECTORIES, table)
    found = trajectories_of(read_table(files, "r/t.parquet", TRAJECTORIES))
    assert len(found) == len(made)
    for one, other in zip(made, found, strict=True):
        assert_same(one, other)
    assert not any(table.column("text_repaired").to_pylist())


@settings(max_examples=40)
@given(trajectories(ANY_TEXT))
def test_text_of_any_kind_can_be_stored_and_leaves_the_tokens_alone(made):  # case E16
    table = trajectories_table([(0, made)])
    (found,) = trajectories_of(table)
    np.testing.assert_array_equal(found.token_ids, made.token_ids)
    np.testing.assert_array_equal(found.logprobs, made.logprobs)
    texts = [made.task, made.reply, made.failure, *(m.content for m in made.messages), *(m.name for m in made.messages)]
    texts += [getattr(turn, name) for turn in made.turns for name in ("action_name", "arguments_json", "error")]
    broken = any("\ud800" <= letter <= "\udfff" for text in texts if text for letter in text)
    assert table.column("text_repaired").to_pylist() == [broken]
    if not broken:
        assert_same(made, found)


@pytest.mark.parametrize(
    ("emitted", "stored", "repaired"),
    [
        ("ok \ud83d broken", "ok \ufffd broken", True),
        ("\ude00\ud83d", "\ufffd\ufffd", True),
        ("cut \ud83d", "cut \ufffd", True),
        ("\ud83d\ude00", "😀", True),  # a pair in two escapes is joined
        ("\ufeffmark", "\ufeffmark", False),
        ("\x00", "\x00", False),
        ("", "", False),
    ],
)
def test_half_an_emoji_becomes_a_replacement_character_and_is_flagged(emitted, stored, repaired):  # case E16
    table = trajectories_table([(0, trajectory(KEY, reply=emitted))])
    assert table.column("reply").to_pylist() == [stored]
    assert table.column("text_repaired").to_pylist() == [repaired]


def test_a_missing_logprob_is_null_in_the_file_and_nan_in_memory():  # cases E19, I3
    made = replace(trajectory(KEY, tokens=4), logprobs=np.array([np.nan, -0.25, np.nan, 0.0], dtype=np.float32))
    table = trajectories_table([(0, made)])
    assert table.column("logprobs").to_pylist() == [[None, -0.25, None, 0.0]]
    np.testing.assert_array_equal(trajectories_of(table)[0].logprobs, made.logprobs)


def test_identity_is_stored_beside_the_key_it_is_made_of():
    child = KEY.child("searcher", 2)
    table = trajectories_table([(5, trajectory(KEY)), (5, trajectory(child))])
    rows = table.select(
        ["trajectory_id", "parent_id", "query_position", "agent_path", "depth", "call_index"]
    ).to_pylist()
    assert rows == [
        {
            "trajectory_id": KEY.trajectory_id,
            "parent_id": None,
            "query_position": 5,
            "agent_path": "main",
            "depth": 0,
            "call_index": 0,
        },
        {
            "trajectory_id": child.trajectory_id,
            "parent_id": KEY.trajectory_id,
            "query_position": 5,
            "agent_path": "main/2:searcher",
            "depth": 1,
            "call_index": 2,
        },
    ]


def test_counts_and_version_are_those_of_the_stream():
    made = trajectory(KEY, tokens=8)  # 3 prompt tokens, 5 sampled
    row = trajectories_table([(0, made)]).select(["tokens", "sampled_tokens", "policy_version"]).to_pylist()
    assert row == [{"tokens": 8, "sampled_tokens": 5, "policy_version": 3}]
    silent = replace(made, turns=())
    assert trajectories_table([(0, silent)]).column("policy_version").to_pylist() == [None]


def test_outcomes_without_tokens_make_trajectories_without_tokens():
    table = trajectories_table([(0, trajectory(KEY))]).select(OUTCOME_COLUMNS)
    (found,) = trajectories_of(table)
    assert (found.reply, found.key, len(found.token_ids)) == ("42", KEY, 0)


def test_arrays_of_a_slice_are_those_of_its_rows():
    made = [trajectory(KEY.child("searcher", call), tokens=3 + call) for call in range(5)]
    column = trajectories_table([(0, one) for one in made]).slice(2, 2).column("token_ids")
    for array, one in zip(list_arrays(column), made[2:4], strict=True):
        np.testing.assert_array_equal(array, one.token_ids)


def test_trajectories_of_a_slice_are_those_of_its_rows():
    made = [
        replace(one, turns=one.turns * index, messages=one.messages * (4 - index))
        for index, one in enumerate(trajectory(KEY.child("searcher", call), tokens=3 + call) for call in range(5))
    ]
    table = trajectories_table([(0, one) for one in made]).slice(1, 3)
    for one, found in zip(made[1:4], trajectories_of(table), strict=True):
        assert_same(one, found)


def test_rows_over_several_files_become_trajectories_in_order(local_files):
    made = [trajectory(KEY.child("searcher", call)) for call in range(4)]
    paths = [
        write_table(
            local_files, f"r/{index}.parquet", TRAJECTORIES, trajectories_table([(0, made[row]) for row in rows])
        ).path
        for index, rows in enumerate([(0, 1), (), (2, 3)])
    ]
    found = trajectories_of(read_table(local_files, paths, TRAJECTORIES))
    assert [one.trajectory_id for one in found] == [one.trajectory_id for one in made]
    for one, other in zip(made, found, strict=True):
        assert_same(one, other)
