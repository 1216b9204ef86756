"""Trajectories as a controller would have ended them, without one."""

import numpy as np
import pytest

from mgrpo_core.trajectories import PathStep, Rollout, Status, StopReason, Trajectory, TrajectoryKey, Turn


def trajectory(
    *actions: str,
    path: tuple[tuple[str, int], ...] = (("main", 0),),
    stop: StopReason = StopReason.ANSWER,
    status: Status = Status.OK,
    reply: str | None = "Lima",
    failure: str | None = None,
) -> Trajectory:
    turns = tuple(
        Turn(index, index + 1, "stop", 0, index, action, error="bad" if action == "invalid" else None)
        for index, action in enumerate(actions or ("answer",))
    )
    tokens = len(turns)
    return Trajectory(
        key=TrajectoryKey("r", 0, "q", 0, tuple(PathStep(agent, index) for agent, index in path)),
        policy="p",
        token_ids=np.zeros(tokens, np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32),
        segment_starts=(0,),
        turns=turns,
        messages=(),
        task="?",
        reply=reply,
        temperature=1.0,
        status=status,
        stop_reason=stop,
        failure=failure,
    )


@pytest.fixture(scope="session")
def make_trajectory():
    return trajectory


@pytest.fixture(scope="session")
def make_rollout():
    def rollout(*trajectories: Trajectory) -> Rollout:
        return Rollout("q", 0, trajectories)

    return rollout
