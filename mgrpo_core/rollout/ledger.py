"""What one rollout has done so far, at all its levels."""

from mgrpo_core.trajectories import Rollout, Trajectory


class RolloutLedger:
    """Trajectories of one rollout as they end, and its count of delegations."""

    def __init__(self, query_id: str, rollout_index: int, max_delegations: int) -> None:
        self._query_id = query_id
        self._rollout_index = rollout_index
        self._max_delegations = max_delegations
        self._delegations = 0
        self._ended: list[Trajectory] = []

    @property
    def max_delegations(self) -> int:
        return self._max_delegations

    def take_delegation(self) -> bool:
        """Count one more delegation; False if the rollout has used up what it may."""
        if self._delegations >= self._max_delegations:
            return False
        self._delegations += 1
        return True

    def add(self, trajectory: Trajectory) -> None:
        self._ended.append(trajectory)

    def rollout(self) -> Rollout:
        """Every trajectory, parents before children, siblings in the order of their calls: not as they arrived."""
        ordered = sorted(self._ended, key=lambda one: one.key.call_order)
        return Rollout(self._query_id, self._rollout_index, tuple(ordered))
