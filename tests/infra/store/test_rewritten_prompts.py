"""Which prompts of an agent its chat template rewrote: from segments and turns, with no token read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infra.store.rewritten_prompts import NextPrompts, next_prompts_of
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.trajectories import PathStep, Status, StopReason, Trajectory, TrajectoryKey, Turn


def trajectory(index: int, turn_starts: list[int], segment_starts: list[int]) -> Trajectory:
    """Each turn samples one token; a segment that begins after the last turn was never sent."""
    turns = tuple(Turn(start, start + 1, "stop", 0, 7, "tool", "search", "{}") for start in turn_starts)
    key = TrajectoryKey("r", 0, "q", index, (PathStep("main", 0),))
    nothing = np.zeros(100)
    tokens, logprobs = nothing.astype(np.int32), np.full(100, np.nan, np.float32)
    end = (Status.OK, StopReason.ANSWER)
    return Trajectory(
        key,
        "main",
        tokens,
        nothing.astype(bool),
        logprobs,
        tuple(segment_starts),
        turns,
        (),
        "task",
        "reply",
        1.0,
        *end,
    )


def counted(*rows: tuple[list[int], list[int]]) -> NextPrompts:
    return next_prompts_of(trajectories_table([(0, trajectory(index, *row)) for index, row in enumerate(rows)]))


def test_a_rewritten_prompt_is_a_segment_that_a_later_turn_answered() -> None:
    found = counted(
        ([5, 10, 15], [0]),  # two later prompts, both extend
        ([], [0]),  # lost before its first turn
        ([5], [0, 6]),  # one turn; the reply to it was laid out anew, and nobody was asked with it
        ([5, 10, 20, 25], [0, 11]),  # three later prompts; the one of turn 2 was rewritten
        ([5, 20, 40], [0, 6, 21, 41]),  # two, both rewritten; the last segment was never sent
    )
    # 2 + 0 + 0 + 3 + 2 later prompts, 1 + 2 of them rewritten
    assert found == NextPrompts(7, 3, first=(3, 2))
    assert found.share == 3 / 7


def test_without_a_second_turn_there_is_no_share() -> None:
    assert counted() == counted(([], [0]), ([3], [0])) == NextPrompts(0, 0, None)
    assert counted(([3], [0])).share is None


def plain(rows: list[tuple[list[int], list[int]]]) -> NextPrompts:
    """Turn by turn: was there a segment between the turn before and this one?"""
    count, hits = 0, []
    for row, (turns, segments) in enumerate(rows):
        for index in range(1, len(turns)):
            count += 1
            if any(turns[index - 1] < start <= turns[index] for start in segments):
                hits.append((row, index))
    return NextPrompts(count, len(hits), hits[0] if hits else None)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Turns, and after some of them a segment before the next turn."""
    turns, segments, at = [], [0], 0
    for rewritten in draw(st.lists(st.booleans(), max_size=4)):
        at += draw(st.integers(1, 5))
        turns.append(at)
        at += 1
        if rewritten:
            segments.append(at)
    return turns, segments


@given(st.lists(rows(), max_size=6))
def test_counts_are_those_of_a_plain_loop(some: list[tuple[list[int], list[int]]]) -> None:
    assert counted(*some) == plain(some)
