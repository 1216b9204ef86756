"""The clipped surrogate of M-GRPO and its companions, as sums that do not depend on how a batch is split."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo_core.errors import ConfigError, ShapeError
from mgrpo_core.update.loss_settings import ClipRange, Correction, KLEstimator, LossSettings
from mgrpo_core.update.metric_sums import MetricSums, ratio_sums
from mgrpo_core.update.update_settings import OldLogprobs

_LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: beyond it float32 overflows soon, and no ratio means anything


@dataclass(frozen=True, slots=True)
class Denominators:
    """What sums over an optimiser batch are divided by. Computed before any micro-batch, over all of them.

    Attributes:
        weight: sum of the weights of the trajectories.
        tokens: sum of weight x sampled tokens.
    """

    weight: float
    tokens: float

    @staticmethod
    def of(weights: Sequence[float], lengths: Sequence[int]) -> "Denominators":
        """From the weight and the number of sampled tokens of every trajectory of the optimiser batch."""
        return Denominators(
            weight=float(sum(weights)),
            tokens=float(sum(weight * length for weight, length in zip(weights, lengths, strict=True))),
        )


@dataclass(frozen=True, slots=True)
class LossBatch:
    """Log-probs of one micro-batch with what they are weighed by. N trajectories in B sequences.

    Values where the mask is False are never read, whatever they are. `logprobs_BT` and `entropy_BT` carry gradient; all
    other tensors are constants.

    Attributes:
        logprobs_BT: log pi(token) under the policy in training, with gradient.
        entropy_BT: entropy at the token's position, nats.
        old_logprobs_BT: under the policy that the ratio compares with; None = the policy in training as it stands,
            so that every ratio is exactly 1.
        sampler_logprobs_BT: as the sampler reported them; NaN where it reported none.
        ref_logprobs_BT: under the reference policy; None = there is none.
        mask_BT: bool, True on sampled tokens.
        trajectory_B: int64, which of the N trajectories a sequence belongs to.
        advantage_N: advantage of each trajectory, the same at every token.
        weight_N: multiplicity of each trajectory.
        length_N: sampled tokens of the whole trajectory, those in other micro-batches included.
        old_logprobs_of: who computed `old_logprobs_BT`. Where the sampler did, there is nothing left to correct, and
            the mismatch is that of the policy as it stands.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    old_logprobs_BT: Tensor | None
    sampler_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor | None
    mask_BT: Tensor
    trajectory_B: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    length_N: Tensor
    old_logprobs_of: OldLogprobs = "trainer"


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's share of the loss of its optimiser batch. Shares add up to the loss.

    Attributes:
        total: to be minimised: -surrogate + kl.coefficient x KL - entropy_bonus x entropy; scalar with gradient.
        by_trajectory_N: each trajectory's share of `total`, detached.
        sums: what the metrics are made of.
    """

    total: Tensor
    by_trajectory_N: Tensor
    sums: MetricSums


def policy_loss(batch: LossBatch, denominators: Denominators, settings: LossSettings) -> Loss:
    """A micro-batch's share of the clipped surrogate loss, to be minimised.

    With A the advantage, w the multiplicity and n the sampled tokens of a trajectory, r the ratio to the old policy and
    v the importance correction (detached), the loss at a token is

        v max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 bounded above by -v A c if dual clip is on,
        + kl.coefficient KL - entropy_bonus H.

    It is summed with the coefficient w / (n sum w) for `trajectory_mean`, w / sum w n for `token_mean`, and
    w / (L sum w) for `constant`; the sums in the denominators run over the whole optimiser batch, so any split into
    micro-batches gives the same loss and gradient, and a trajectory of weight w counts like w literal copies.

    Log-ratios are masked before they are exponentiated, and bounded to +-20 (gradient 0 beyond). A token without a
    sampler log-prob has v = 1 and is counted.

    Raises:
        ShapeError: if a sequence-level number is asked for and a trajectory is not whole in the micro-batch.
        ConfigError: if a KL coefficient is given but no reference log-probs.
    Source: M-GRPO Eq. 14-17; PPO clipping with the bounds of DAPO.
    """
    mask_BT, trajectory_B = batch.mask_BT, batch.trajectory_B
    if settings.whole_trajectories:
        _require_whole(batch)
    new_BT = _masked(batch.logprobs_BT, mask_BT)
    old_BT = new_BT.detach() if batch.old_logprobs_BT is None else _masked(batch.old_logprobs_BT, mask_BT)
    advantage_B1 = batch.advantage_N[trajectory_B, None]
    weight_BT = batch.weight_N[trajectory_B, None] * mask_BT
    length_B1 = batch.length_N[trajectory_B, None]

    log_ratio_BT = new_BT - old_BT
    level_BT = _mean_over_trajectory(log_ratio_BT, batch) if settings.ratio == "sequence" else log_ratio_BT
    ratio_BT = _bounded_exp(level_BT)
    surrogate_BT = clipped_surrogate(ratio_BT, advantage_B1, settings.clip)

    known_BT = mask_BT & torch.isfinite(batch.sampler_logprobs_BT)
    sampler_BT = _masked(batch.sampler_logprobs_BT, known_BT)
    gap_BT = torch.where(known_BT, old_BT - sampler_BT, 0.0)
    trainer_BT = old_BT if batch.old_logprobs_of == "trainer" else new_BT.detach()
    correction_BT = importance_correction(gap_BT, batch, settings.correction)

    token_loss_BT = correction_BT * surrogate_BT
    kl_BT = None
    if batch.ref_logprobs_BT is not None:
        ref_BT = _masked(batch.ref_logprobs_BT, mask_BT)
        kl_BT = kl_estimate(new_BT, ref_BT, old_BT, settings.kl.estimator)
        if settings.kl.coefficient:
            token_loss_BT = token_loss_BT + settings.kl.coefficient * kl_BT
    elif settings.kl.coefficient:
        raise ConfigError(
            f"policy_loss: kl.coefficient is {settings.kl.coefficient}, but there are no reference log-probs. "
            "Pass a reference policy, or set the coefficient to 0."
        )
    entropy_BT = _masked(batch.entropy_BT, mask_BT)
    if settings.entropy_bonus:
        token_loss_BT = token_loss_BT - settings.entropy_bonus * entropy_BT

    share_B1 = batch.weight_N[trajectory_B, None] * _coefficient(length_B1, denominators, settings)
    # Selected, not multiplied by the mask: 0 * inf would be NaN.
    share_BT = torch.where(mask_BT, share_B1 * token_loss_BT, 0.0)
    by_trajectory_N = torch.zeros_like(batch.weight_N).index_add(
        0, trajectory_B, share_BT.detach().sum(1).to(batch.weight_N.dtype)
    )
    sums = ratio_sums(
        weight_BT=weight_BT,
        mask_BT=mask_BT,
        log_ratio_BT=log_ratio_BT.detach(),
        ratio_BT=ratio_BT.detach(),
        advantage_BT=advantage_B1.expand_as(ratio_BT),
        clip=settings.clip,
        entropy_BT=entropy_BT.detach(),
        kl_BT=None if kl_BT is None else kl_BT.detach(),
        gap_BT=gap_BT,
        mismatch_BT=torch.where(known_BT, trainer_BT - sampler_BT, 0.0),
        known_BT=known_BT,
        correction_BT=correction_BT,
        correction=settings.correction,
    )
    return Loss(total=share_BT.sum(), by_trajectory_N=by_trajectory_N, sums=sums)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Loss max(-A r, -A clip(r, 1 - low, 1 + high)); for A < 0 at most -A dual, if dual clip is on. Elementwise.

    Past a bound that binds, the gradient is exactly 0: low binds for A < 0 and r < 1 - low, high for A > 0 and
    r > 1 + high, dual for A < 0 and r > dual.
    """
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * clip.dual), loss)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) from sampled tokens, elementwise. With x = ref - logp:

    ========= ==================== ============================= ==============================================
    estimator value                 E[value] on-policy            E[gradient] on-policy
    ========= ==================== ============================= ==============================================
    k1        -x                    KL(policy || ref)             0: no regularisation at all
    k2        x^2 / 2               biased                        that of KL(policy || ref)
    k3        e^x - x - 1           KL(policy || ref)             that of KL(ref || policy)
    k3_ratio  r (e^x - x - 1)       KL(policy || ref)             that of KL(policy || ref), also off-policy
    ========= ==================== ============================= ==============================================

    r = exp(logp - old), unclipped, keeps its gradient: the score-function term that the other three leave out.
    Only k2 and k3_ratio pull towards the reference as KL(policy || ref) does. Exponents are bounded to +-20.
    Source: Schulman, "Approximating KL divergence" (2020); gradients derived by hand and tested.
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    k3 = _bounded_exp(x) - x - 1
    return k3 if estimator == "k3" else _bounded_exp(logprobs - old_logprobs) * k3


def importance_correction(gap_BT: Tensor, batch: LossBatch, correction: Correction) -> Tensor:
    """Constant weight of each token's surrogate, from gap = old - sampler log-prob, 0 where unknown: `Correction`."""
    if correction.mode == "none":
        return torch.ones_like(gap_BT)
    level_BT = _mean_over_trajectory(gap_BT, batch) if correction.level == "sequence" else gap_BT
    weight_BT = _bounded_exp(level_BT)
    if correction.mode == "truncate":
        return weight_BT.clamp(max=correction.cap)
    inside_BT = (weight_BT <= correction.cap) & (weight_BT >= 1 / correction.cap)
    return torch.where(inside_BT, weight_BT, 0.0)


def _masked(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, value_BT, 0.0)


def _bounded_exp(value: Tensor) -> Tensor:
    return value.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def _mean_over_trajectory(value_BT: Tensor, batch: LossBatch) -> Tensor:
    """Mean over the sampled tokens of the token's trajectory, at each of them. `value_BT` is 0 where masked."""
    total_N = torch.zeros(len(batch.length_N), dtype=value_BT.dtype, device=value_BT.device)
    total_N = total_N.index_add(0, batch.trajectory_B, value_BT.sum(1))
    mean_N = total_N / batch.length_N.to(value_BT.dtype)
    return torch.where(batch.mask_BT, mean_N[batch.trajectory_B, None], 0.0)


def _coefficient(length_B1: Tensor, denominators: Denominators, settings: LossSettings) -> Tensor:
    if settings.reduction == "trajectory_mean":
        return 1.0 / (length_B1 * denominators.weight)
    if settings.reduction == "token_mean":
        return torch.full_like(length_B1, 1.0 / denominators.tokens)
    assert settings.constant_length is not None
    return torch.full_like(length_B1, 1.0 / (settings.constant_length * denominators.weight))


def _require_whole(batch: LossBatch) -> None:
    here_N = torch.zeros_like(batch.length_N).index_add(
        0, batch.trajectory_B, batch.mask_BT.sum(1).to(batch.length_N.dtype)
    )
    if not torch.equal(here_N, batch.length_N):
        place = int((here_N != batch.length_N).nonzero()[0, 0])
        raise ShapeError(
            f"policy_loss: trajectory {place} of the micro-batch has {int(here_N[place])} of its "
            f"{int(batch.length_N[place])} sampled tokens here. A sequence-level ratio or correction needs it whole: "
            "pack with keep_together, or use the token level."
        )
