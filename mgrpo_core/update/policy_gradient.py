"""One policy's update: gradients over micro-batches, checked, clipped, and stepped."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mgrpo_core.errors import ConfigError, NonFiniteError, ShapeError
from mgrpo_core.update.dropout import dropout_off
from mgrpo_core.update.gradients import Gradients
from mgrpo_core.update.loss import Denominators
from mgrpo_core.update.metric_sums import MetricSums, metrics_of
from mgrpo_core.update.packing import PackingPlan, Segment
from mgrpo_core.update.ranks import OneRank, OtherRankError, Ranks
from mgrpo_core.update.training_trajectory import TrainingTrajectory
from mgrpo_core.update.update_metrics import UpdateMetrics
from mgrpo_core.update.update_settings import UpdateSettings

__all__ = ["OneRank", "Progress", "Ranks", "TrainingTrajectory", "UpdateMetrics", "UpdateSettings", "policy_gradient"]

Progress = Callable[[int, int], None]
"""Called after each micro-batch with this process's real tokens done, and in all."""

_ADVICE = (
    "No optimiser step was taken on this minibatch. Look at the trajectory's log-probs and advantage; if several are "
    "like this, the policy's weights are broken: resume from an earlier version with a lower learning rate."
)


def policy_gradient(
    model: nn.Module,
    trajectories: Sequence[TrainingTrajectory],
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    *,
    rng: np.random.Generator,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    reference: nn.Module | None = None,
    on_progress: Progress | None = None,
    ranks: Ranks | None = None,
    all_ids: Sequence[str] | None = None,
) -> UpdateMetrics:
    """Update one policy in place on an iteration's trajectories.

    The trajectories are put in the order of their ids and, for more than one step, permuted by `rng` into minibatches,
    anew each epoch; every minibatch is one optimiser batch with its own denominators. So the result is a function of
    the set of trajectories, the settings and the generator; on the CPU it is so bit for bit. A trajectory of weight 0
    or without a sampled token takes no part. A minibatch whose advantages are all 0 carries no signal and takes no
    step, so that neither momentum nor weight decay moves the policy.

    Args:
        model: a Hugging Face causal LM, or a SampledLogprobs over one (sharded as one, say). Dropout is off meanwhile.
        trajectories: distinct ones, each with its advantage and multiplicity; none is fine.
        optimizer: over the model's trainable parameters. Its gradients are cleared before and after.
        settings: see there.
        rng: seeded from the keys of the update; drawn from only for more than one step.
        scheduler: stepped once after each optimiser step.
        reference: frozen reference policy, or None.
        on_progress: told about tokens done.
        ranks: the processes of a sharded update, each with trajectories of its own; None = this one alone. Loss,
            gradient and metrics are those of all the trajectories together.
        all_ids: ids of the trajectories that take part, over all ranks: minibatches are drawn from them, so that how
            many ranks there are decides nothing. Needed where there is more than one rank and more than one step.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite; names the trajectory. Raised before that minibatch's
            optimiser step, gradients cleared.
        ShapeError: if a trajectory does not fit a micro-batch, or `all_ids` are not those of the ranks together.
        ConfigError: if the settings want a reference or ids that are not given.
    Source: M-GRPO, arXiv:2511.13288, Eq. 14-19; each policy on its own.
    """
    if settings.loss.kl.coefficient and reference is None:
        raise ConfigError(
            f"policy_gradient: kl.coefficient is {settings.loss.kl.coefficient}, but there is no reference policy. "
            "Pass one, or set the coefficient to 0."
        )
    taking_part = sorted(
        (trajectory for trajectory in trajectories if trajectory.weight > 0 and trajectory.loss_mask.any()),
        key=lambda trajectory: trajectory.trajectory_id,
    )
    gradients = Gradients(model, reference, taking_part, settings)
    ranks = ranks or OneRank()
    minibatches = _minibatches(_places(taking_part, all_ids, gradients, ranks, settings), settings, rng)
    with dropout_off(model), dropout_off(reference or nn.Identity()):
        update = _Update(gradients, optimizer, settings, ranks, on_progress, minibatches)
        try:
            update.run(scheduler)
        finally:
            optimizer.zero_grad(set_to_none=True)
    return update.metrics()


class _Update:
    """Optimiser steps over minibatches, and what they add up to."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        settings: UpdateSettings,
        ranks: Ranks,
        on_progress: Progress | None,
        minibatches: Sequence[Sequence[int]],
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._settings = settings
        self._ranks = ranks
        self._on_progress = on_progress
        signal = [float(any(gradients.trajectories[i].advantage != 0 for i in part)) for part in minibatches]
        signals = self._over_ranks(ranks.maximum, signal)
        self._steps = [
            (part, gradients.plan(part)) for part, signal in zip(minibatches, signals, strict=True) if signal > 0
        ]
        self._skipped_steps = len(minibatches) - len(self._steps)
        self._total_tokens = sum(plan.tokens for _, plan in self._steps)
        self._tokens_done = 0
        self._sums = MetricSums.zero(gradients.device)
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._lr = _lr(optimizer)

    def run(self, scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> None:
        if len(self._steps) > 1:
            passes = self._gradients.passes_before_first_step([plan for _, plan in self._steps])
            for segments in self._in_step(passes):
                self._gradients.score_before_first_step(segments)
        for minibatch, plan in self._steps:
            self._optimizer.zero_grad(set_to_none=True)
            denominators = self._denominators(minibatch)
            loss = self._accumulate(plan, denominators)
            norm = _clip(self._optimizer, self._settings.max_grad_norm)
            if not np.isfinite(norm):
                raise self._blame_for_gradient(plan, denominators, norm)
            self._lr = _lr(self._optimizer)
            self._optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self._losses.append(loss)
            self._norms.append(norm)

    def metrics(self) -> UpdateMetrics:
        trajectories = self._gradients.trajectories
        tokens, computed, count, weight, *losses = self._over_ranks(
            self._ranks.sum,
            [
                self._total_tokens,
                sum(plan.computed_tokens for _, plan in self._steps),
                len(trajectories),
                sum(trajectory.weight for trajectory in trajectories),
                *self._losses,
            ],
        )
        sums = MetricSums(self._ranks.sum(self._sums.sums), self._ranks.maximum(self._sums.maxima))
        return UpdateMetrics(
            **asdict(metrics_of(sums)),
            loss=float(np.mean(losses)) if losses else 0.0,
            grad_norm=float(np.mean(self._norms)) if self._norms else 0.0,
            grad_norm_max=max(self._norms, default=0.0),
            trajectories=round(count),
            weight=weight,
            optimizer_steps=len(self._steps),
            skipped_steps=self._skipped_steps,
            tokens_computed=round(computed),
            padding_share=1 - tokens / computed if computed else 0.0,
            lr=self._lr,
        )

    def _accumulate(self, plan: PackingPlan, denominators: Denominators) -> float:
        """Add up the gradient of a minibatch; its loss over the trajectories of this process."""
        total = 0.0
        for segments in self._in_step(plan.micro_batches):
            # Both ways compute the model once: a sharded model talks to the other ranks while it does.
            share = self._gradients.loss(segments, denominators) if segments else None
            loss = self._gradients.idle_loss() if share is None else share.total
            bad = None if share is None else _first_not_finite(share.by_trajectory_N)
            (any_bad,) = self._over_ranks(self._ranks.maximum, [float(bad is not None)])
            if any_bad:
                raise self._blame_for_loss(segments, bad)
            # A sharded model averages gradients over ranks, and shares add up: hence the factor.
            torch.autograd.backward(loss * self._ranks.count)
            if share is None:
                continue
            total += share.total.item()
            self._sums = self._sums + share.sums
            self._tokens_done += sum(segment.length for segment in segments)
            if self._on_progress:
                self._on_progress(self._tokens_done, self._total_tokens)
        return total

    def _in_step(self, micro_batches: Sequence[Sequence[Segment]]) -> list[Sequence[Segment]]:
        """The micro-batches, followed by as many empty ones as it takes to do as many passes as every other rank."""
        (passes,) = self._over_ranks(self._ranks.maximum, [len(micro_batches)])
        return [*micro_batches, *([()] * (round(passes) - len(micro_batches)))]

    def _denominators(self, minibatch: Sequence[int]) -> Denominators:
        own = self._gradients.denominators(minibatch)
        weight, tokens = self._over_ranks(self._ranks.sum, [own.weight, own.tokens])
        return Denominators(weight, tokens)

    def _over_ranks(self, reduce: Callable[[Tensor], Tensor], values: Sequence[float]) -> list[float]:
        reduced = reduce(torch.tensor(values, dtype=torch.float64, device=self._gradients.device))
        return cast("list[float]", cast("Any", reduced).tolist())

    def _blame_for_loss(self, segments: Sequence[Segment], place: int | None) -> NonFiniteError:
        if place is None:
            return OtherRankError(f"the loss of another rank is not finite; its error names the trajectory. {_ADVICE}")
        index = sorted({segment.trajectory for segment in segments})[place]
        trajectory_id = self._gradients.trajectories[index].trajectory_id
        return NonFiniteError(f"trajectory {trajectory_id}: its share of the loss is not finite. {_ADVICE}")

    def _blame_for_gradient(self, plan: PackingPlan, denominators: Denominators, norm: float) -> NonFiniteError:
        """Find the trajectory whose gradient is not finite, one at a time: slow, and only on the way out."""
        if self._ranks.count > 1:
            return NonFiniteError(f"the gradient norm over {self._ranks.count} ranks is {norm}. {_ADVICE}")
        by_trajectory: dict[int, list[Segment]] = {}
        for segment in (segment for segments in plan.micro_batches for segment in segments):
            by_trajectory.setdefault(segment.trajectory, []).append(segment)
        whole = self._settings.loss.whole_trajectories
        for index, segments in by_trajectory.items():
            self._optimizer.zero_grad(set_to_none=True)
            for part in [segments] if whole else [[segment] for segment in segments]:
                torch.autograd.backward(self._gradients.loss(part, denominators).total)
            own_norm = _clip(self._optimizer, self._settings.max_grad_norm)
            if not np.isfinite(own_norm):
                trajectory_id = self._gradients.trajectories[index].trajectory_id
                return NonFiniteError(f"trajectory {trajectory_id}: the norm of its gradient is {own_norm}. {_ADVICE}")
        return NonFiniteError(
            f"the gradient norm of {len(by_trajectory)} trajectories is {norm}, though that of each alone is finite: "
            f"their sum overflows. {_ADVICE}"
        )


def _places(
    own: Sequence[TrainingTrajectory],
    all_ids: Sequence[str] | None,
    gradients: Gradients,
    ranks: Ranks,
    settings: UpdateSettings,
) -> list[int | None]:
    """For each trajectory of all ranks, in the order of their ids, its place among this rank's own."""
    if all_ids is None:
        if ranks.count > 1 and settings.optimizer_steps > 1:
            raise ConfigError(
                f"policy_gradient: {ranks.count} ranks and {settings.optimizer_steps} minibatches, but not the ids of "
                "all trajectories, from which minibatches are drawn. Pass all_ids."
            )
        return list(range(len(own)))
    place = {trajectory.trajectory_id: index for index, trajectory in enumerate(own)}
    places = [place.get(one) for one in sorted(all_ids)]
    held = sum(one is not None for one in places)
    counts = torch.tensor([len(own), held], dtype=torch.float64, device=gradients.device)
    trained, found = cast("list[float]", cast("Any", ranks.sum(counts)).tolist())
    if not trained == found == len(all_ids):
        raise ShapeError(
            f"policy_gradient: {round(trained)} trajectories take part over {ranks.count} ranks, {round(found)} of "
            f"them among the {len(all_ids)} of all_ids; expected each id on exactly one rank."
        )
    return places


def _minibatches(places: Sequence[int | None], settings: UpdateSettings, rng: np.random.Generator) -> list[list[int]]:
    """Indices of this rank's trajectories of each minibatch, over all epochs; ascending within one."""
    if settings.optimizer_steps == 1:
        return [[place for place in places if place is not None]] * settings.epochs
    orders = [rng.permutation(len(places)) for _ in range(settings.epochs)]
    parts = [
        cast("list[int]", part.tolist()) for order in orders for part in np.array_split(order, settings.optimizer_steps)
    ]
    return [sorted(place for index in part if (place := places[index]) is not None) for part in parts]


def _first_not_finite(value_N: Tensor) -> int | None:
    bad_N = ~torch.isfinite(value_N)
    return int(bad_N.int().argmax()) if bad_N.any() else None


def _lr(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _clip(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Scale gradients to `max_norm` if they exceed it; their norm before that."""
    norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    return float(cast("Any", norm).full_tensor() if hasattr(norm, "full_tensor") else norm)
