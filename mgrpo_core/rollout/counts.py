"""What became of the rollouts of an iteration: everything accounted for, nothing missing in silence."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from mgrpo_core.trajectories import Rollout, Status, Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """Sums over trajectories. `ok + policy_failed + infra_failed == trajectories`, always.

    Attributes:
        sampled_tokens: tokens that policies sampled; tool text between them is not counted.
        malformed_turns: finished turns that held no valid action.
        truncated_turns: turns cut by a limit: counted apart, they are not malformed.
        calls: turns that tried to call something, by a name at least.
        refused_calls: those that the parser (unknown name, wrong arguments), the tool or a limit refused.
    """

    trajectories: int = 0
    ok: int = 0
    policy_failed: int = 0
    infra_failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    malformed_turns: int = 0
    truncated_turns: int = 0
    calls: int = 0
    refused_calls: int = 0

    def __add__(self, other: "TrajectoryCounts") -> "TrajectoryCounts":
        names = (field.name for field in fields(self))
        return TrajectoryCounts(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def refused_share(self) -> float:
        """Share of calls that were refused, in [0, 1]; 0 where nothing was called."""
        return self.refused_calls / self.calls if self.calls else 0.0


def count_trajectories(trajectories: Iterable[Trajectory]) -> TrajectoryCounts:
    """Counts over these trajectories."""
    return sum((_counts_of(one) for one in trajectories), TrajectoryCounts())


def duplicate_share(rollouts: Iterable[Rollout]) -> float:
    """Share of a group's main trajectories that equal an earlier one token for token, in [0, 1).

    A group of clones has no signal: at a temperature above 0 a share near 1 says that seeds are reused.
    """
    streams = [rollout.trajectories[0].token_ids.tobytes() for rollout in rollouts]
    return 1 - len(set(streams)) / len(streams) if streams else 0.0


def _counts_of(trajectory: Trajectory) -> TrajectoryCounts:
    cut = [turn for turn in trajectory.turns if turn.finish_reason == "length"]
    whole = [turn for turn in trajectory.turns if turn.finish_reason == "stop"]
    calls = [turn for turn in whole if turn.action_name is not None]
    return TrajectoryCounts(
        trajectories=1,
        ok=int(trajectory.status is Status.OK),
        policy_failed=int(trajectory.status is Status.POLICY_FAILED),
        infra_failed=int(trajectory.status is Status.INFRA_FAILED),
        turns=len(trajectory.turns),
        sampled_tokens=trajectory.sampled_tokens,
        malformed_turns=sum(turn.action == "invalid" for turn in whole),
        truncated_turns=len(cut),
        calls=len(calls),
        refused_calls=sum(turn.error is not None for turn in calls),
    )
