"""Did a trajectory keep to the format? The parser's own verdicts decide, so controller and reward cannot differ."""

from mgrpo_core.trajectories import StopReason, Trajectory


def format_valid(trajectory: Trajectory) -> bool:
    """True if every turn held one valid action and the last was an answer (algorithm.md section 6, row 23).

    A call that a tool or a limit refused was well formed; a turn that was cut or malformed was not.
    """
    return trajectory.stop_reason is StopReason.ANSWER and all(turn.action != "invalid" for turn in trajectory.turns)
