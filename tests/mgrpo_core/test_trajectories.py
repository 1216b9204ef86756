"""A trajectory's id is its key, written as JSON and hashed: stores of every version depend on it."""

import hashlib
import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.trajectories import PathStep, TrajectoryKey

TEXT = st.text(max_size=8)
COUNT = st.integers(min_value=0, max_value=2**40)


@given(TEXT, COUNT, TEXT, COUNT, st.lists(st.tuples(TEXT, COUNT), max_size=2))
def test_an_id_is_the_hash_of_the_key_as_a_json_list(run, iteration, query_id, rollout, calls):
    key = TrajectoryKey(run, iteration, query_id, rollout, (PathStep("main", 0),))
    for agent, call in calls:
        key = key.child(agent, call)
    text = json.dumps([run, iteration, query_id, rollout, key.agent_path], separators=(",", ":"))
    assert key.trajectory_id == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_an_id_does_not_change_between_versions():
    key = TrajectoryKey("r", 3, "q0", 1, (PathStep("main", 0),)).child("searcher", 2)
    assert key.trajectory_id == hashlib.sha256(b'["r",3,"q0",1,"main/2:searcher"]').hexdigest()[:32]


def test_a_key_whose_id_was_asked_for_equals_one_whose_id_was_not():
    asked, fresh = (TrajectoryKey("r", 0, "q", 0, (PathStep("main", 0),)) for _ in range(2))
    assert asked.trajectory_id
    assert (asked, hash(asked), repr(asked)) == (fresh, hash(fresh), repr(fresh))
    assert pickle.loads(pickle.dumps(asked)).trajectory_id == fresh.trajectory_id
