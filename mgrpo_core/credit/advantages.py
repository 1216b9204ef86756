"""Advantages relative to a group: all aligned trajectories that one agent has for one query."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mgrpo_core.errors import ConfigError, NonFiniteError, ShapeError, require_shape

Normalization = Literal["population", "sample", "center", "leave_one_out", "batch_std"]

_LARGEST_REWARD = 1e150


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of rows, and the statistics of their G groups. All floats are float64.

    A row counts if its reward was observed and its weight is above 0. A group with no such row has size 0, weight 0,
    mean NaN and std NaN.

    Attributes:
        advantage_N: exactly 0.0 wherever `included_N` is False.
        included_N: the row counts, and its group has two rows or more that count and differ in reward. All others
            carry no signal: leave them out of the loss and of its denominators alike.
        group_index_N: place of the row's group in the arrays below.
        group_G: distinct group ids, ascending.
        mean_G: weighted mean reward.
        std_G: weighted standard deviation; with Bessel's correction for `sample`, without it for all others.
        size_G: rows that count, not weighted. 1 = a singleton, with nothing to compare it with.
        weight_G: their total weight W.
        zero_variance_G: size at least 2 and all rewards equal, decided by max == min, not by a rounded std.
        batch_std: sqrt(sum w c^2 / sum w) of the centred rewards c over all groups of size 2 or more; 0 without any.
            The divisor of `batch_std`.
    """

    advantage_N: np.ndarray
    included_N: np.ndarray
    group_index_N: np.ndarray
    group_G: np.ndarray
    mean_G: np.ndarray
    std_G: np.ndarray
    size_G: np.ndarray
    weight_G: np.ndarray
    zero_variance_G: np.ndarray
    batch_std: float


def group_relative_advantages(
    reward_N: np.ndarray,
    weight_N: np.ndarray | None = None,
    *,
    normalization: Normalization = "population",
    eps: float = 1e-6,
) -> np.ndarray:
    """Advantage of each member over its own group: A_i = (r_i - mean r) / (std r + eps).

    One group of `grouped_advantages`, which see for weights, normalizations and errors.

    Args:
        reward_N: rewards of one agent's trajectories for one query, shape [N], N >= 1.
        weight_N: multiplicities, shape [N]; None = 1 each.
        normalization: what a centred reward is divided by.
        eps: added to the standard deviation, in units of reward. Ours: the paper has none.

    Returns: advantages, float64 [N], weighted mean 0 up to rounding; exact zeros if all rewards are equal.
    Source: M-GRPO, arXiv:2511.13288, Eq. 9-10 (main), 12-13 (sub).
    """
    require_shape(reward_N, "N", "reward_N")
    group_N = np.zeros(len(reward_N), dtype=np.int64)
    return grouped_advantages(reward_N, group_N, weight_N, normalization=normalization, eps=eps).advantage_N


def grouped_advantages(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    weight_N: np.ndarray | None = None,
    observed_N: np.ndarray | None = None,
    *,
    normalization: Normalization = "population",
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Advantages over each row's own group, for many groups at once.

    Over the rows of a group that count, with weights w (multiplicities from `alignment.member_weight`), W = sum w,
    mean = sum w r / W and c_i = r_i - mean:

    - `population` (M-GRPO Eq. 9-13): A_i = c_i / (sqrt(sum w c^2 / W) + eps). Then |A_i| <= sqrt((W - w_i) / w_i),
      which is sqrt(n - 1) for n rows of weight 1; sum w A = 0; sum w A^2 = W at eps 0.
    - `sample` (slime, torch.std): W - 1 in place of W, as if each row were w literal copies. A group with W <= 1 has no
      sample deviation: advantage 0, not included.
    - `center` (Dr. GRPO, arXiv:2503.20783): A_i = c_i.
    - `leave_one_out` (RLOO, arXiv:2402.14740): r_i minus the mean of the other rows. A trajectory leaves with all its
      copies, or its own reward would be in its baseline.
      A_i = r_i - sum_{j != i} w_j r_j / (W - w_i) = c_i W / (W - w_i).
    - `batch_std`: A_i = c_i / (batch_std + eps), group mean, but one deviation over the centred rewards of all groups.

    All but `leave_one_out` give a row of weight w what they give each of w rows of weight 1.

    Membership is a matter of `group_N` alone: rows may come in any order, and a permutation of the rows permutes the
    result bit for bit. Statistics are float64 whatever comes in, and two-pass.

    Args:
        reward_N: rewards, any real dtype, shape [N]; N = 0 is fine. Ignored where not observed, NaN included.
        group_N: group id of each row, integers or strings, shape [N].
        weight_N: weights >= 0, shape [N]; None = 1 each. Weight 0 takes a row out of its group.
        observed_N: bool, shape [N]; False where there is no reward (judge down, rollout failed). None = all observed.
            A missing reward is not a 0: pass it here.
        normalization: see above.
        eps: added to the standard deviation, in units of reward, >= 0. Ours (1e-6, as slime): the paper has none.

    Raises:
        ShapeError: if shapes differ, a weight is negative or not finite, or rewards are not numbers.
        NonFiniteError: if an observed reward is NaN or infinite, or above 1e150, whose square sum may overflow.
        ConfigError: if the normalization is unknown or eps is negative.
    """
    if normalization not in get_args(Normalization):
        raise ConfigError(f"normalization {normalization!r}, expected one of {', '.join(get_args(Normalization))}.")
    if not eps >= 0:
        raise ConfigError(f"advantage eps is {eps}, expected 0 or more (1e-6).")
    reward_N, weight_N, counts_N = _checked(reward_N, group_N, weight_N, observed_N)
    group_G, group_index_N = np.unique(group_N, return_inverse=True)
    groups = len(group_G)

    # Sums run over rows sorted by (group, reward, weight), so that they do not depend on the order of the rows.
    rows = np.flatnonzero(counts_N)
    rows = rows[np.lexsort((weight_N[rows], reward_N[rows], group_index_N[rows]))]
    group, reward, weight = group_index_N[rows], reward_N[rows], weight_N[rows]
    size_G = np.bincount(group, minlength=groups)
    weight_G = np.bincount(group, weights=weight, minlength=groups)

    def mean_by_group(value: np.ndarray) -> np.ndarray:
        total_G = np.bincount(group, weights=weight * value, minlength=groups)
        return np.divide(total_G, weight_G, out=np.full(groups, np.nan), where=size_G > 0)

    # In units of the group's spread, 0 = lowest and 1 = highest reward: exactly 0 where all rewards are equal, rounded
    # in proportion to the differences and not to the rewards, and no square underflows.
    lowest_G, spread_G = _range(reward, size_G)
    varied_G = spread_G > 0
    unit_G = np.where(varied_G, spread_G, 1.0)
    place = (reward - lowest_G[group]) / unit_G[group]
    mean_place_G = mean_by_group(place)
    centred = place - mean_place_G[group]
    std_place_G = np.sqrt(mean_by_group(centred**2))

    in_batch = size_G >= 2
    batch_weight = weight_G[in_batch].sum()
    square_sum = (weight_G * (unit_G * std_place_G) ** 2)[in_batch].sum()
    batch_std = float(np.sqrt(square_sum / batch_weight)) if batch_weight else 0.0

    informative_G = varied_G
    if normalization == "sample":
        informative_G = varied_G & (weight_G > 1)
        std_place_G *= np.sqrt(np.divide(weight_G, weight_G - 1, out=np.zeros(groups), where=informative_G))

    included = informative_G[group]
    if normalization in ("population", "sample"):
        with np.errstate(over="ignore"):  # an eps that dwarfs the spread: the advantage is 0
            divisor_G = std_place_G + eps / unit_G
        advantage = _divide(centred, divisor_G[group], included)
    elif normalization == "batch_std":
        advantage = _divide(centred * unit_G[group], np.full(len(rows), batch_std + eps), included)
    elif normalization == "center":
        advantage = centred * unit_G[group]
    else:
        advantage = _divide(centred * unit_G[group] * weight_G[group], weight_G[group] - weight, included)

    advantage_N = np.zeros(len(reward_N))
    advantage_N[rows] = advantage
    included_N = np.zeros(len(reward_N), dtype=bool)
    included_N[rows] = included
    return GroupAdvantages(
        advantage_N=advantage_N,
        included_N=included_N,
        group_index_N=group_index_N,
        group_G=group_G,
        mean_G=lowest_G + unit_G * mean_place_G,
        std_G=unit_G * std_place_G,
        size_G=size_G,
        weight_G=weight_G,
        zero_variance_G=(size_G >= 2) & ~varied_G,
        batch_std=batch_std,
    )


def _range(reward: np.ndarray, size_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest reward (NaN without any) and max - min (0 without any) of each group; sorted by group."""
    lowest_G, spread_G = np.full(len(size_G), np.nan), np.zeros(len(size_G))
    has_rows_G = size_G > 0
    last_G = np.cumsum(size_G)[has_rows_G] - 1
    lowest_G[has_rows_G] = reward[last_G - size_G[has_rows_G] + 1]
    spread_G[has_rows_G] = reward[last_G] - lowest_G[has_rows_G]
    return lowest_G, spread_G


def _divide(value: np.ndarray, by: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.divide(value, by, out=np.zeros(len(value)), where=where & (by > 0))


def _checked(
    reward_N: np.ndarray, group_N: np.ndarray, weight_N: np.ndarray | None, observed_N: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards and weights as float64, and which rows count."""
    shape = reward_N.shape
    for name, array in (("group_N", group_N), ("weight_N", weight_N), ("observed_N", observed_N)):
        if array is not None and (array.ndim != 1 or array.shape != shape):
            raise ShapeError(f"grouped_advantages: reward_N has shape {shape}, {name} {array.shape}; expected [N].")
    if reward_N.dtype == object or reward_N.dtype.kind in "USMmc":
        raise ShapeError(
            f"grouped_advantages: rewards are {reward_N.dtype}, expected numbers. "
            "Where a reward is missing, put any number and observed_N False."
        )
    observed_N = np.ones(shape, dtype=bool) if observed_N is None else observed_N
    if observed_N.dtype != bool:
        raise ShapeError(f"grouped_advantages: observed_N is {observed_N.dtype}, expected bool.")
    weights = np.ones(shape) if weight_N is None else weight_N.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad.size:
        raise ShapeError(f"grouped_advantages: weight of row {bad[0]} is {weights[bad[0]]}, expected 0 or more.")
    rewards = np.where(observed_N, reward_N.astype(np.float64), 0.0)
    bad = np.flatnonzero(~(abs(rewards) <= _LARGEST_REWARD))
    if bad.size:
        raise NonFiniteError(
            f"grouped_advantages: reward of row {bad[0]} (group {group_N[bad[0]]}) is {rewards[bad[0]]}, expected a "
            f"finite number of at most {_LARGEST_REWARD:g}. A missing reward is passed as observed_N False."
        )
    return rewards, weights, observed_N & (weights > 0)
