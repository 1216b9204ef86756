"""Micro-batches of made-up log-probs, for tests of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mgrpo_core.update.loss import Denominators, Loss, LossBatch, policy_loss
from mgrpo_core.update.loss_settings import LossSettings
from mgrpo_core.update.metric_sums import MetricSums
from tests.oracles import LoopTrajectory


@dataclass(frozen=True)
class Leaves:
    """Tensors that gradient flows to: log-probs and entropies of each trajectory's sampled tokens."""

    new: list[torch.Tensor]
    entropy: list[torch.Tensor]

    @staticmethod
    def of(trajectories: Sequence[LoopTrajectory], dtype: torch.dtype = torch.float64) -> "Leaves":
        return Leaves(
            [torch.tensor(t.new, dtype=dtype, requires_grad=True) for t in trajectories],
            [torch.tensor(t.entropy, dtype=dtype, requires_grad=True) for t in trajectories],
        )

    def gradients(self) -> list[list[float]]:
        return [[] if leaf.grad is None else leaf.grad.tolist() for leaf in (*self.new, *self.entropy)]


def sampled(
    new: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    sampler: Sequence[float] | None = None,
    ref: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
    advantage: float = 1.0,
    weight: float = 1.0,
) -> LoopTrajectory:
    """A trajectory of sampled tokens; what is not given equals the new log-probs (entropy 1)."""
    old = list(new) if old is None else old
    return LoopTrajectory(
        new=new,
        old=old,
        sampler=old if sampler is None else sampler,
        ref=new if ref is None else ref,
        entropy=[1.0] * len(new) if entropy is None else entropy,
        advantage=advantage,
        weight=weight,
    )


def denominators_of(trajectories: Sequence[LoopTrajectory]) -> Denominators:
    return Denominators.of([t.weight for t in trajectories], [len(t.new) for t in trajectories])


def micro_batch(
    trajectories: Sequence[LoopTrajectory],
    leaves: Leaves,
    which: Sequence[int],
    *,
    padding: int = 0,
    junk: float = 0.0,
    gaps: int = 0,
    with_reference: bool = True,
    split_rows: bool = False,
) -> LossBatch:
    """Lay the trajectories `which` out in rows: `gaps` masked places before each token, `padding` after the last.

    Masked places hold `junk` in every column. With `split_rows`, a trajectory's tokens are spread over two rows.
    """
    rows: list[tuple[int, list[int]]] = []
    for place, index in enumerate(which):
        tokens = list(range(len(trajectories[index].new)))
        halves = [tokens[::2], tokens[1::2]] if split_rows and len(tokens) > 1 else [tokens]
        rows += [(place, half) for half in halves]
    width = max(len(tokens) for _, tokens in rows) * (gaps + 1) + padding
    dtype = leaves.new[0].dtype

    def column(values: Sequence[torch.Tensor]) -> torch.Tensor:
        lines = []
        for place, tokens in rows:
            line = [torch.tensor(junk, dtype=dtype)] * width
            for slot, token in enumerate(tokens):
                line[slot * (gaps + 1) + gaps] = values[which[place]][token]
            lines.append(torch.stack(line))
        return torch.stack(lines)

    def constants(name: str) -> list[torch.Tensor]:
        return [torch.tensor(getattr(t, name), dtype=dtype) for t in trajectories]

    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (_, tokens) in enumerate(rows):
        for slot in range(len(tokens)):
            mask[row, slot * (gaps + 1) + gaps] = True
    own = [trajectories[index] for index in which]
    return LossBatch(
        logprobs_BT=column(leaves.new),
        entropy_BT=column(leaves.entropy),
        old_logprobs_BT=column(constants("old")),
        sampler_logprobs_BT=column(constants("sampler")),
        ref_logprobs_BT=column(constants("ref")) if with_reference else None,
        mask_BT=mask,
        trajectory_B=torch.tensor([place for place, _ in rows]),
        advantage_N=torch.tensor([t.advantage for t in own], dtype=dtype),
        weight_N=torch.tensor([t.weight for t in own], dtype=dtype),
        length_N=torch.tensor([len(t.new) for t in own], dtype=dtype),
    )


def loss_over(
    trajectories: Sequence[LoopTrajectory],
    settings: LossSettings,
    *,
    split: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float64,
    **layout: object,
) -> tuple[float, list[list[float]], MetricSums]:
    """Loss, gradients (log-probs, then entropies) and sums of an optimiser batch, in the micro-batches of `split`."""
    leaves = Leaves.of(trajectories, dtype)
    denominators = denominators_of(trajectories)
    total, sums = 0.0, MetricSums.zero(torch.device("cpu"))
    for which in split or [list(range(len(trajectories)))]:
        share: Loss = policy_loss(micro_batch(trajectories, leaves, which, **layout), denominators, settings)
        share.total.backward()
        total += share.total.item()
        sums = sums + share.sums
    return total, leaves.gradients(), sums
