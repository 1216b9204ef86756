"""Credit as it would be without one invocation: its rollout aligned again, its group compared again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mgrpo_core.credit.advantages import GroupAdvantages, Normalization, grouped_advantages
from mgrpo_core.credit.alignment import AlignmentMode, align, member_weight
from mgrpo_core.errors import ShapeError


@dataclass(frozen=True, slots=True)
class CreditRules:
    """How an agent's trajectories get weight and advantage: see `align` and `grouped_advantages`."""

    d: int
    alignment: AlignmentMode = "random"
    normalization: Normalization = "population"
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Credit:
    """Weight and advantage of rows. `included_N`: the row enters the loss."""

    weight_N: np.ndarray
    advantage_N: np.ndarray
    included_N: np.ndarray


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The others of a group, with an invocation and without it.

    Attributes:
        others_N: rows of the group that stay.
        before: their credit as it is.
        after: as it would be.
    """

    others_N: np.ndarray
    before: Credit
    after: Credit


class LeaveOneOut:
    """The scored trajectories of one agent, all groups of an iteration.

    Rewards stay as they are: what the main agent would have made of a missing reply is not known.

    Args:
        reward_N: of each scored trajectory, float [N].
        group_N: its group, integers or strings, [N]: the query.
        rollout_N: its rollout, integers in [0, R), [N]. Trajectories of one rollout stand in call order, and are of one
            group.
        rollout_key_R: from `rollout_keys`: an alignment draws again what it drew.
        rules: of the agent.

    Raises: what `align` and `grouped_advantages` raise.
    """

    def __init__(
        self,
        reward_N: np.ndarray,
        group_N: np.ndarray,
        rollout_N: np.ndarray,
        rollout_key_R: np.ndarray,
        rules: CreditRules,
    ) -> None:
        self._reward_N = reward_N
        self._rollout_N = rollout_N
        self._rollout_key_R = rollout_key_R
        self._rules = rules
        weight_N = member_weight(align(rollout_N, rollout_key_R, rules.d, rules.alignment), len(rollout_N))
        whole = grouped_advantages(reward_N, group_N, weight_N, normalization=rules.normalization, eps=rules.eps)
        self.credit = Credit(weight_N, whole.advantage_N, whole.included_N)
        self._group_index_N = whole.group_index_N
        self._square_sum_G, self._batch_weight_G = _spread(whole)
        by_group_N = np.argsort(whole.group_index_N, kind="stable")
        ends_G = np.cumsum(np.bincount(whole.group_index_N, minlength=len(whole.group_G)))
        self._rows_of_group = np.split(by_group_N, ends_G[:-1]) if len(ends_G) else []

    def without(self, left_out: Sequence[int]) -> LeftOut:
        """One of `without_each`."""
        return self.without_each([left_out])[0]

    def without_each(self, left_outs: Sequence[Sequence[int]]) -> list[LeftOut]:
        """Credit of the others of a group, for several cases of what was left out, each on its own.

        In the mode `random` the rollout's copies are drawn again, by the same key, among fewer: part of the effect is
        another draw. In `weighted` all of it is the invocation's.

        Args:
            left_outs: of each case the rows of one rollout, at least one.

        Raises: ShapeError if there is none, or they are of two rollouts.
        """
        if not left_outs:
            return []
        gone_of = [np.asarray(rows, dtype=np.int64) for rows in left_outs]
        rollout_C = np.array([self._only_rollout(gone) for gone in gone_of], dtype=np.int64)
        group_C = np.array([self._group_index_N[gone[0]] for gone in gone_of])
        rows_of = [self._others(group, gone) for group, gone in zip(group_C, gone_of, strict=True)]
        rows = np.concatenate(rows_of)
        case = np.repeat(np.arange(len(rows_of)), [len(others) for others in rows_of])
        weight = self.credit.weight_N[rows]
        # Each case is a rollout of its own to `align`, and a group of its own below: nothing else has changed. The
        # picks of one rollout do not depend on the others, so theirs stay as they are.
        siblings = np.flatnonzero(self._rollout_N[rows] == rollout_C[case])
        aligned = align(case[siblings], self._rollout_key_R[rollout_C], self._rules.d, self._rules.alignment)
        weight[siblings] = member_weight(aligned, len(siblings))
        after = self._compared(rows, case, weight, group_C)
        ends = np.cumsum([len(others) for others in rows_of])[:-1]
        return [
            LeftOut(others, _taken(self.credit, others), Credit(*parts))
            for others, *parts in zip(
                rows_of,
                np.split(after.weight_N, ends),
                np.split(after.advantage_N, ends),
                np.split(after.included_N, ends),
                strict=True,
            )
        ]

    def _only_rollout(self, gone: np.ndarray) -> int:
        rollouts = set(self._rollout_N[gone].tolist())
        if len(rollouts) != 1:
            raise ShapeError(f"LeaveOneOut.without_each: rows of {len(rollouts)} rollouts, expected those of one.")
        return rollouts.pop()

    def _others(self, group: int, gone: np.ndarray) -> np.ndarray:
        rows = self._rows_of_group[group]
        return np.delete(rows, np.searchsorted(rows, gone))  # a group's rows ascend

    def _compared(self, rows: np.ndarray, case: np.ndarray, weight: np.ndarray, group_C: np.ndarray) -> Credit:
        """Advantages under other weights, each case a group."""
        over_batch = self._rules.normalization == "batch_std"
        found = grouped_advantages(
            self._reward_N[rows],
            case,
            weight,
            normalization="center" if over_batch else self._rules.normalization,
            eps=self._rules.eps,
        )
        advantage = found.advantage_N
        if over_batch:
            divisor = (self._batch_std_of(found, group_C) + self._rules.eps)[case]
            advantage = np.divide(advantage, divisor, out=np.zeros(len(rows)), where=divisor > 0)
        return Credit(weight, advantage, found.included_N)

    def _batch_std_of(self, found: GroupAdvantages, group_C: np.ndarray) -> np.ndarray:
        """`batch_std` of each case: all groups but its own as they are, its own as it would be."""
        square_sum_C, weight_C = np.zeros(len(group_C)), np.zeros(len(group_C))
        square_sum_C[found.group_G], weight_C[found.group_G] = _spread(found)  # a case without others has no group
        for place, group in enumerate(group_C):
            square_sum_C[place] += np.delete(self._square_sum_G, group).sum()
            weight_C[place] += np.delete(self._batch_weight_G, group).sum()
        return np.sqrt(np.divide(square_sum_C, weight_C, out=np.zeros(len(group_C)), where=weight_C > 0))


@dataclass(frozen=True, slots=True)
class CreditChange:
    """What leaving out does to the credit of others.

    Attributes:
        others: how many there are.
        mean_change: mean |A' - A| over them.
        largest_change: the A' - A of largest size; 0.0 without others.
        sign_changes: of which the advantage is above 0 in one and below 0 in the other.
        lost: that enter the loss, and would not.
        gained: that do not, and would.
        mean_pull_change: mean |w' A' - w A|.
    """

    others: int = 0
    mean_change: float = 0.0
    largest_change: float = 0.0
    sign_changes: int = 0
    lost: int = 0
    gained: int = 0
    mean_pull_change: float = 0.0


def credit_change(parts: Sequence[LeftOut]) -> CreditChange:
    """Sum up over groups: an invocation's own, and those of what was delegated under it."""
    if not any(len(part.others_N) for part in parts):
        return CreditChange()

    def joined(name: str) -> tuple[np.ndarray, np.ndarray]:
        before, after = ([getattr(credit, name) for credit in side] for side in zip(*pairs, strict=True))
        return np.concatenate(before), np.concatenate(after)

    pairs = [(part.before, part.after) for part in parts]
    (before_N, after_N), (weight_N, new_weight_N), (in_N, now_in_N) = (
        joined("advantage_N"),
        joined("weight_N"),
        joined("included_N"),
    )
    change_N = after_N - before_N
    return CreditChange(
        others=len(change_N),
        mean_change=float(np.abs(change_N).mean()),
        largest_change=float(change_N[np.abs(change_N).argmax()]),
        sign_changes=int((before_N * after_N < 0).sum()),
        lost=int((in_N & ~now_in_N).sum()),
        gained=int((~in_N & now_in_N).sum()),
        mean_pull_change=float(np.abs(new_weight_N * after_N - weight_N * before_N).mean()),
    )


def _spread(groups: GroupAdvantages) -> tuple[np.ndarray, np.ndarray]:
    """What each group adds to the numerator and the denominator of the square of `batch_std`."""
    in_batch_G = groups.size_G >= 2
    square_sum_G = np.where(in_batch_G, groups.weight_G * np.nan_to_num(groups.std_G) ** 2, 0.0)
    return square_sum_G, np.where(in_batch_G, groups.weight_G, 0.0)


def _taken(credit: Credit, rows: np.ndarray) -> Credit:
    return Credit(credit.weight_N[rows], credit.advantage_N[rows], credit.included_N[rows])
