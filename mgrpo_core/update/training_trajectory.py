"""A trajectory as the update sees it: tokens, credit and multiplicity, nothing of the dialogue."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mgrpo_core.errors import NonFiniteError, ShapeError


@dataclass(frozen=True, slots=True)
class TrainingTrajectory:
    """One distinct trajectory of an update.

    Attributes:
        trajectory_id: names it in errors, and orders trajectories of equal length.
        token_ids: int32 [T], T >= 1.
        loss_mask: True where the policy sampled the token, bool [T]; False at every segment start.
        sampler_logprobs: log-probability of each sampled token as the sampler reported it at `temperature`, float [T];
            NaN where it reported none. Not read where `loss_mask` is False.
        segment_starts: offsets at which a new context begins, ascending, first always 0.
        temperature: of sampling, >= 0; 0 (greedy) is scored at 1, as the sampler reports it.
        advantage: finite, the same at every token.
        weight: multiplicity >= 0; 0 = takes no part.

    Raises:
        ShapeError, NonFiniteError: when built from something else, with the trajectory's id.
    """

    trajectory_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    sampler_logprobs: np.ndarray
    segment_starts: tuple[int, ...]
    temperature: float
    advantage: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name, array in (
            ("token_ids", self.token_ids),
            ("loss_mask", self.loss_mask),
            ("sampler_logprobs", self.sampler_logprobs),
        ):
            if array.shape != (length,) or length == 0:
                raise ShapeError(
                    f"trajectory {self.trajectory_id}: {name} has shape {array.shape}, expected [{max(length, 1)}] "
                    "like token_ids, one entry a token."
                )
        if self.loss_mask.dtype != bool:
            raise ShapeError(f"trajectory {self.trajectory_id}: loss_mask is {self.loss_mask.dtype}, expected bool.")
        starts = self.segment_starts
        ascending = all(a < b for a, b in pairwise((*starts, length)))
        if not starts or starts[0] != 0 or not ascending:
            raise ShapeError(
                f"trajectory {self.trajectory_id}: segment_starts {starts}, expected ascending offsets below {length}, "
                "the first 0."
            )
        for start in starts:
            if self.loss_mask[start]:
                raise ShapeError(
                    f"trajectory {self.trajectory_id}: token {start} opens a segment and is marked as sampled, but "
                    "nothing precedes it to predict it from. Begin each segment with its prompt."
                )
        if not (np.isfinite(self.advantage) and np.isfinite(self.weight)) or self.weight < 0:
            raise NonFiniteError(
                f"trajectory {self.trajectory_id}: advantage {self.advantage}, weight {self.weight}; expected a finite "
                "advantage and a weight of 0 or more. Give a trajectory without a reward the weight 0."
            )
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise NonFiniteError(
                f"trajectory {self.trajectory_id}: temperature {self.temperature}, expected 0 or more."
            )

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by: the temperature of sampling, 1 for greedy."""
        return self.temperature or 1.0
