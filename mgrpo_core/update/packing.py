"""Ragged trajectories into padded micro-batches of bounded size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mgrpo_core.errors import ShapeError
from mgrpo_core.update.training_trajectory import TrainingTrajectory

PaddingSide = Literal["left", "right"]

MAX_PADDING = 0.1
"""A micro-batch takes no sequence that would push its padding above this share of what is computed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One context of a trajectory up to its last sampled token: what one sequence of a micro-batch holds.

    `trajectory` is an index into the list that was planned; token_ids[start:stop] are the tokens.
    """

    trajectory: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Which segments are computed together.

    Attributes:
        micro_batches: segments of each, longest first.
        tokens: real tokens.
        computed_tokens: real tokens and padding.
    """

    micro_batches: tuple[tuple[Segment, ...], ...]
    tokens: int
    computed_tokens: int

    @property
    def padding_share(self) -> float:
        """Padding as a share of what is computed, in [0, 1)."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of some segments. What is padding follows from lengths, never from token values.

    Attributes:
        segments: one a row, in row order.
        offsets: column of each row's first real token.
        trajectories: indices, into the planned list, of the N distinct trajectories here, ascending.
        token_ids_BT: int64.
        attention_mask_BT: bool, True on real tokens.
        position_ids_BT: int64, 0, 1, 2, … over a row's real tokens; 0 on padding.
        loss_mask_BT: bool, True on sampled tokens.
        sampler_logprobs_BT: float64; NaN where there is none.
        temperature_B: float64, > 0.
        trajectory_B: int64, row -> place in `trajectories`.
    """

    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]
    trajectories: tuple[int, ...]
    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    loss_mask_BT: Tensor
    sampler_logprobs_BT: Tensor
    temperature_B: Tensor
    trajectory_B: Tensor

    def lay_out(self, value_by_trajectory: Mapping[int, np.ndarray]) -> Tensor:
        """Per-token values of whole trajectories, keyed by index, at their places here; NaN on padding, float64."""
        value_BT = np.full(self.token_ids_BT.shape, np.nan)
        for row, (segment, offset) in enumerate(zip(self.segments, self.offsets, strict=True)):
            values = value_by_trajectory[segment.trajectory][segment.start : segment.stop]
            value_BT[row, offset : offset + segment.length] = values
        return torch.as_tensor(value_BT, device=self.token_ids_BT.device)

    def take_back(self, value_BT: Tensor, value_by_trajectory: Mapping[int, np.ndarray]) -> None:
        """The inverse of `lay_out`: write the real places of `value_BT` into the arrays of their trajectories."""
        values = value_BT.detach().double().cpu().numpy()
        for row, (segment, offset) in enumerate(zip(self.segments, self.offsets, strict=True)):
            part = values[row, offset : offset + segment.length]
            value_by_trajectory[segment.trajectory][segment.start : segment.stop] = part


def plan_micro_batches(
    trajectories: Sequence[TrainingTrajectory], token_budget: int, *, keep_together: bool = False
) -> PackingPlan:
    """Divide trajectories into micro-batches of at most `token_budget` computed tokens (rows x longest row).

    Segments are sorted by length, then trajectory id, and taken greedily. A micro-batch is closed when the next one
    does not fit, or would push its padding above MAX_PADDING; so the plan is a function of the set of trajectories, not
    of their order, and pads at most that share. Contexts without a sampled token, and tokens after the last sampled one
    of a context, change no log-prob of a sampled token and are left out.

    Args:
        trajectories: as many as the optimiser batch has; none is fine.
        token_budget: tokens computed at once, padding included.
        keep_together: put all segments of a trajectory into one micro-batch (sequence-level ratios need them all);
            padding may then exceed MAX_PADDING.

    Raises:
        ShapeError: if a sequence, or with `keep_together` a trajectory, alone exceeds the budget; names it.
    """
    units = [segments for index in range(len(trajectories)) if (segments := _segments_of(trajectories[index], index))]
    if not keep_together:
        units = [[segment] for segments in units for segment in segments]
    units.sort(
        key=lambda unit: (-_longest(unit), trajectories[unit[0].trajectory].trajectory_id, unit[0].start),
    )
    micro_batches: list[tuple[Segment, ...]] = []
    current: list[Segment] = []
    for unit in units:
        if len(unit) * _longest(unit) > token_budget:
            raise ShapeError(_does_not_fit(trajectories[unit[0].trajectory].trajectory_id, unit, token_budget))
        if current and not _joins(unit, current, token_budget):
            micro_batches.append(tuple(current))
            current = []
        current.extend(unit)
    if current:
        micro_batches.append(tuple(current))
    return PackingPlan(
        micro_batches=tuple(micro_batches),
        tokens=sum(segment.length for batch in micro_batches for segment in batch),
        computed_tokens=sum(len(batch) * _longest(batch) for batch in micro_batches),
    )


def pack(
    trajectories: Sequence[TrainingTrajectory],
    segments: Sequence[Segment],
    *,
    side: PaddingSide = "right",
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad the segments of one micro-batch to the longest.

    Args:
        trajectories: the list that was planned.
        segments: one micro-batch of the plan, at least one segment.
        side: where padding goes; explicit position ids make both sides the same to the model.
        pad_token_id: any valid id, even one that occurs as a real token.
        device: of the tensors.
    """
    width = _longest(segments)
    shape = (len(segments), width)
    token_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=bool)
    position_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=bool)
    sampler_logprobs = np.full(shape, np.nan)
    offsets = tuple(width - segment.length if side == "left" else 0 for segment in segments)
    for row, (segment, offset) in enumerate(zip(segments, offsets, strict=True)):
        trajectory = trajectories[segment.trajectory]
        to, source = slice(offset, offset + segment.length), slice(segment.start, segment.stop)
        token_ids[row, to] = trajectory.token_ids[source]
        attention_mask[row, to] = True
        position_ids[row, to] = np.arange(segment.length)
        loss_mask[row, to] = trajectory.loss_mask[source]
        sampler_logprobs[row, to] = trajectory.sampler_logprobs[source]
    here = sorted({segment.trajectory for segment in segments})
    place = {index: place for place, index in enumerate(here)}
    temperatures = [trajectories[segment.trajectory].scoring_temperature for segment in segments]
    return MicroBatch(
        segments=tuple(segments),
        offsets=offsets,
        trajectories=tuple(here),
        token_ids_BT=torch.as_tensor(token_ids, device=device),
        attention_mask_BT=torch.as_tensor(attention_mask, device=device),
        position_ids_BT=torch.as_tensor(position_ids, device=device),
        loss_mask_BT=torch.as_tensor(loss_mask, device=device),
        sampler_logprobs_BT=torch.as_tensor(sampler_logprobs, device=device),
        temperature_B=torch.tensor(temperatures, dtype=torch.float64, device=device),
        trajectory_B=torch.tensor([place[segment.trajectory] for segment in segments], device=device),
    )


def _segments_of(trajectory: TrainingTrajectory, index: int) -> list[Segment]:
    """Contexts with a sampled token, cut after their last one."""
    segments: list[Segment] = []
    for start, stop in zip(
        trajectory.segment_starts, (*trajectory.segment_starts[1:], len(trajectory.token_ids)), strict=True
    ):
        sampled = np.flatnonzero(trajectory.loss_mask[start:stop])
        if sampled.size:
            segments.append(Segment(index, start, start + int(sampled[-1]) + 1))
    return segments


def _longest(segments: Sequence[Segment]) -> int:
    return max(segment.length for segment in segments)


def _joins(unit: Sequence[Segment], current: Sequence[Segment], token_budget: int) -> bool:
    together = [*current, *unit]
    computed = len(together) * _longest(together)
    tokens = sum(segment.length for segment in together)
    return computed <= token_budget and computed - tokens <= MAX_PADDING * computed


def _does_not_fit(trajectory_id: str, unit: Sequence[Segment], token_budget: int) -> str:
    if len(unit) == 1:
        return (
            f"trajectory {trajectory_id}: a sequence of {unit[0].length} tokens does not fit the micro-batch budget of "
            f"{token_budget} tokens. Raise update.micro_batch_tokens to at least {unit[0].length}, "
            "or lower the context or token limits of its agent."
        )
    return (
        f"trajectory {trajectory_id}: its {len(unit)} segments of up to {_longest(unit)} tokens must be computed "
        f"together for a sequence-level ratio or correction, and do not fit the micro-batch budget of {token_budget} "
        f"tokens. Raise update.micro_batch_tokens to at least {len(unit) * _longest(unit)}, or use the token level."
    )
