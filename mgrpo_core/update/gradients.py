"""Losses of micro-batches under one policy: who is compared with whom, and what each costs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mgrpo_core.update.logprobs import SampledLogprobs
from mgrpo_core.update.loss import Denominators, Loss, LossBatch, policy_loss
from mgrpo_core.update.packing import MicroBatch, PackingPlan, Segment, pack, plan_micro_batches
from mgrpo_core.update.training_trajectory import TrainingTrajectory
from mgrpo_core.update.update_settings import UpdateSettings


class Gradients:
    """The trajectories of one update, and how their micro-batches are scored.

    Args:
        model: the policy in training, a Hugging Face causal LM or a SampledLogprobs over one.
        reference: reference policy, likewise, or None.
        trajectories: those that take part: weight above 0, at least one sampled token.
        settings: of the update.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        trajectories: Sequence[TrainingTrajectory],
        settings: UpdateSettings,
    ) -> None:
        self.trajectories = trajectories
        self.device = next(model.parameters()).device
        self._settings = settings
        self._policy = self._scorer(model)
        self._reference = None if reference is None else self._scorer(reference)
        self._lengths = [trajectory.sampled_tokens for trajectory in trajectories]
        self._old: dict[int, np.ndarray] | None = None
        self._ref: dict[int, np.ndarray] | None = None

    def _scorer(self, model: nn.Module) -> SampledLogprobs:
        if isinstance(model, SampledLogprobs):
            return model
        dtype = torch.bfloat16 if self._settings.compute_dtype == "bfloat16" else torch.float32
        return SampledLogprobs(model, logits_at_once=self._settings.logits_at_once, compute_dtype=dtype)

    def plan(self, minibatch: Sequence[int]) -> PackingPlan:
        """Micro-batches of a minibatch; their segments refer to the trajectories of the whole update."""
        plan = plan_micro_batches(
            [self.trajectories[index] for index in minibatch],
            self._settings.micro_batch_tokens,
            keep_together=self._settings.loss.whole_trajectories,
        )
        micro_batches = tuple(
            tuple(Segment(minibatch[segment.trajectory], segment.start, segment.stop) for segment in segments)
            for segments in plan.micro_batches
        )
        return PackingPlan(micro_batches, plan.tokens, plan.computed_tokens)

    def denominators(self, minibatch: Sequence[int]) -> Denominators:
        """Of this process's trajectories of the minibatch."""
        return Denominators.of(
            [self.trajectories[index].weight for index in minibatch], [self._lengths[index] for index in minibatch]
        )

    def passes_before_first_step(self, plans: Sequence[PackingPlan]) -> list[tuple[Segment, ...]]:
        """Micro-batches that `score_before_first_step` needs: those of the plans, each segment once."""
        if self._settings.old_logprobs != "trainer" and self._reference is None:
            return []
        seen: set[Segment] = set()
        passes: list[tuple[Segment, ...]] = []
        for segments in (segments for plan in plans for segments in plan.micro_batches):
            new = tuple(segment for segment in segments if segment not in seen)
            seen.update(new)
            if new:
                passes.append(new)
        return passes

    def score_before_first_step(self, segments: Sequence[Segment]) -> None:
        """Keep what later steps compare with: log-probs under the policy as it stands, and under the reference.

        In the micro-batches of the first epoch, whose shapes make the ratios of the first step exactly 1.
        No segments: a pass of no consequence, for a rank that has run out.
        """
        micro_batch = self._pack(segments) if segments else self._idle_micro_batch()
        with torch.no_grad():
            if self._settings.old_logprobs == "trainer":
                self._old = self._blank() if self._old is None else self._old
                micro_batch.take_back(_score(self._policy, micro_batch)[0], self._old)
            if self._reference is not None:
                self._ref = self._blank() if self._ref is None else self._ref
                micro_batch.take_back(_score(self._reference, micro_batch)[0], self._ref)

    def loss(self, segments: Sequence[Segment], denominators: Denominators) -> Loss:
        """Share of a micro-batch in the loss of its minibatch."""
        micro_batch = self._pack(segments)
        logprobs_BT, entropy_BT = _score(self._policy, micro_batch)

        def as_tensor(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=logprobs_BT.dtype, device=self.device)

        here = micro_batch.trajectories
        batch = LossBatch(
            logprobs_BT=logprobs_BT,
            entropy_BT=entropy_BT,
            old_logprobs_BT=self._old_logprobs(micro_batch, logprobs_BT),
            sampler_logprobs_BT=micro_batch.sampler_logprobs_BT.to(logprobs_BT.dtype),
            ref_logprobs_BT=self._ref_logprobs(micro_batch, logprobs_BT),
            mask_BT=micro_batch.loss_mask_BT,
            trajectory_B=micro_batch.trajectory_B,
            advantage_N=as_tensor([self.trajectories[index].advantage for index in here]),
            weight_N=as_tensor([self.trajectories[index].weight for index in here]),
            length_N=as_tensor([self._lengths[index] for index in here]),
            old_logprobs_of=self._settings.old_logprobs,
        )
        return policy_loss(batch, denominators, self._settings.loss)

    def idle_loss(self) -> Tensor:
        """A loss of 0 with gradient 0 through the whole model, for a rank that has run out of micro-batches."""
        micro_batch = self._idle_micro_batch()
        logprobs_BT, _ = _score(self._policy, micro_batch)
        self._ref_logprobs(micro_batch, logprobs_BT)
        return logprobs_BT.sum() * 0.0

    def _blank(self) -> dict[int, np.ndarray]:
        return {index: np.full(len(trajectory.token_ids), np.nan) for index, trajectory in enumerate(self.trajectories)}

    def _pack(self, segments: Sequence[Segment]) -> MicroBatch:
        return pack(self.trajectories, segments, side=self._settings.padding_side, device=self.device)

    def _idle_micro_batch(self) -> MicroBatch:
        nothing = TrainingTrajectory(
            trajectory_id="idle",
            token_ids=np.zeros(2, dtype=np.int32),
            loss_mask=np.array([False, True]),
            sampler_logprobs=np.full(2, np.nan),
            segment_starts=(0,),
            temperature=1.0,
            advantage=0.0,
        )
        packed = pack([nothing], [Segment(0, 0, 2)], device=self.device)
        return replace(packed, segments=(), offsets=())

    def _old_logprobs(self, micro_batch: MicroBatch, logprobs_BT: Tensor) -> Tensor | None:
        if self._settings.old_logprobs == "sampler":
            # Where the sampler reported none, the ratio is 1, as the correction is.
            sampler_BT = micro_batch.sampler_logprobs_BT.to(logprobs_BT.dtype)
            return torch.where(torch.isfinite(sampler_BT), sampler_BT, logprobs_BT.detach())
        return None if self._old is None else micro_batch.lay_out(self._old).to(logprobs_BT.dtype)

    def _ref_logprobs(self, micro_batch: MicroBatch, logprobs_BT: Tensor) -> Tensor | None:
        if self._reference is None:
            return None
        if self._ref is not None:
            return micro_batch.lay_out(self._ref).to(logprobs_BT.dtype)
        with torch.no_grad():
            return _score(self._reference, micro_batch)[0].to(logprobs_BT.dtype)


def _score(scorer: SampledLogprobs, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return scorer(
        micro_batch.token_ids_BT,
        micro_batch.attention_mask_BT,
        micro_batch.position_ids_BT,
        micro_batch.loss_mask_BT,
        micro_batch.temperature_B,
    )
