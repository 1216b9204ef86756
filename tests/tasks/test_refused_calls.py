"""Case D10: every call fails, and training would go on without tools."""

from types import SimpleNamespace

import numpy as np
import pytest

from infra.store.runs import open_store
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.errors import IncompleteIterationError
from mgrpo_core.trajectories import PathStep, Status, StopReason, Trajectory, TrajectoryKey, Turn
from tasks.materialize_trajectories import _require_working_calls
from tasks.tables import TrajectoryTables


def trajectory(index: int, error: str | None) -> Trajectory:
    turns = (
        Turn(1, 2, "stop", 0, 7, "tool", "search", "{}", error),
        Turn(3, 4, "stop", 0, 8, "answer"),
        Turn(4, 5, "length", 0, 9, "invalid", "search", None, "cut"),  # truncated: no call at all
    )
    key = TrajectoryKey("r", 0, "q", index, (PathStep("searcher", 0),))
    nothing = np.zeros(5)
    mask = nothing.astype(bool)
    tokens, logprobs = nothing.astype(np.int32), np.full(5, np.nan, np.float32)
    end = (Status.OK, StopReason.ANSWER)
    return Trajectory(key, "sub", tokens, mask, logprobs, (0,), turns, (), "task", "reply", 1.0, *end)


def check(tmp_path, errors: list[str | None], bound: float) -> None:
    files = open_store(str(tmp_path))
    rows = trajectories_table([(0, trajectory(index, error)) for index, error in enumerate(errors)])
    ref = write_table(files, "r/t.parquet", TRAJECTORIES, rows)
    config = SimpleNamespace(rollout=SimpleNamespace(max_tool_error_share=bound))
    resources = SimpleNamespace(files=files, config=config)
    at = SimpleNamespace(label="r-0000")
    _require_working_calls(resources, at, TrajectoryTables({"searcher": (ref,)}), "searcher")


def test_two_of_three_refused_calls_are_above_a_bound_of_a_half_and_the_reasons_are_told(tmp_path):
    with pytest.raises(
        IncompleteIterationError, match=r"2 of 3 calls of 'searcher'.*at most 50%.*'endpoint unset' \(2\)"
    ):
        check(tmp_path, ["endpoint unset", "endpoint unset", None], 0.5)


def test_a_share_on_the_bound_goes_on(tmp_path):
    check(tmp_path, ["endpoint unset", None], 0.5)


def test_an_agent_without_a_trajectory_has_no_share(tmp_path):
    check(tmp_path, [], 0.0)
