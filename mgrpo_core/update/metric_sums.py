"""Metrics as weighted sums over one mask: additive over micro-batches, divided once at the end."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mgrpo_core.update.loss_settings import ClipRange, Correction


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Float64 sums and maxima over the sampled tokens of micro-batches, each token with its trajectory's multiplicity.

    Attributes:
        sums: see `SUM_NAMES`, one place each.
        maxima: see `MAX_NAMES`.
    """

    sums: Tensor
    maxima: Tensor

    @staticmethod
    def zero(device: torch.device) -> "MetricSums":
        """Of no token."""
        return MetricSums(
            torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device),
            torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device),
        )

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


SUM_NAMES = (
    "weight",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "approx_kl",
    "ratio",
    "entropy",
    "ref_kl",
    "mismatch",
    "known",
    "importance",
    "importance_squared",
    "correction",
    "limited",
    "tokens",
    "missing",
)
MAX_NAMES = ("ratio", "mismatch")


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Means over sampled tokens, each weighed with its trajectory's multiplicity. All finite; 0 where nothing counted.

    Attributes:
        clip_fraction_low: tokens where the lower bound binds (A < 0 and r < 1 - low).
        clip_fraction_high: where the upper bound binds (A > 0 and r > 1 + high).
        clip_fraction_dual: where dual clip binds (A < 0 and r > dual).
        approx_kl: mean of r - 1 - log r, r the token's ratio to the old policy: estimates KL(old || policy), nats.
        ratio_mean: of the ratio that the loss used, token or sequence.
        ratio_max: its maximum.
        entropy: nats a token.
        ref_kl: KL(policy || reference), nats a token, by the estimator of the settings; 0 without a reference.
        mismatch_mean: mean |old - sampler log-prob|, nats, over tokens for which the sampler reported one. Where the
            sampler's own log-probs are the old ones: |policy - sampler|, what earlier steps moved included.
        mismatch_max: its maximum.
        effective_sample_share: (sum w)^2 / (n sum w^2) for w = pi_policy / pi_sampler a token, uncapped; in (0, 1].
        correction_mean: mean importance correction that the loss used.
        corrected_share: tokens whose correction was truncated or masked.
        missing_sampler_tokens: tokens without a finite sampler log-prob, not weighted.
        tokens: sampled tokens, not weighted.
    """

    clip_fraction_low: float = 0.0
    clip_fraction_high: float = 0.0
    clip_fraction_dual: float = 0.0
    approx_kl: float = 0.0
    ratio_mean: float = 0.0
    ratio_max: float = 0.0
    entropy: float = 0.0
    ref_kl: float = 0.0
    mismatch_mean: float = 0.0
    mismatch_max: float = 0.0
    effective_sample_share: float = 0.0
    correction_mean: float = 0.0
    corrected_share: float = 0.0
    missing_sampler_tokens: int = 0
    tokens: int = 0


def metrics_of(sums: MetricSums) -> LossMetrics:
    """Divide the sums by their weights."""
    total = _named(SUM_NAMES, sums.sums)
    most = _named(MAX_NAMES, sums.maxima)
    if not total["weight"]:
        return LossMetrics()

    def mean(name: str) -> float:
        return total[name] / total["weight"]

    return LossMetrics(
        clip_fraction_low=mean("clipped_low"),
        clip_fraction_high=mean("clipped_high"),
        clip_fraction_dual=mean("clipped_dual"),
        approx_kl=mean("approx_kl"),
        ratio_mean=mean("ratio"),
        ratio_max=most["ratio"],
        entropy=mean("entropy"),
        ref_kl=mean("ref_kl"),
        mismatch_mean=total["mismatch"] / total["known"] if total["known"] else 0.0,
        mismatch_max=most["mismatch"],
        effective_sample_share=total["importance"] ** 2 / (total["weight"] * total["importance_squared"]),
        correction_mean=mean("correction"),
        corrected_share=mean("limited"),
        missing_sampler_tokens=round(total["missing"]),
        tokens=round(total["tokens"]),
    )


def _named(names: tuple[str, ...], values: Tensor) -> dict[str, float]:
    return dict(zip(names, cast("list[float]", cast("Any", values).tolist()), strict=True))


def ratio_sums(
    *,
    weight_BT: Tensor,
    mask_BT: Tensor,
    log_ratio_BT: Tensor,
    ratio_BT: Tensor,
    advantage_BT: Tensor,
    clip: ClipRange,
    entropy_BT: Tensor,
    kl_BT: Tensor | None,
    gap_BT: Tensor,
    mismatch_BT: Tensor,
    known_BT: Tensor,
    correction_BT: Tensor,
    correction: Correction,
) -> MetricSums:
    """Sums of one micro-batch. `weight_BT`, log-ratio, gap and mismatch are 0 where masked; all are detached."""
    double = torch.float64
    weight = weight_BT.to(double)
    log_ratio, gap, ratio = log_ratio_BT.to(double), gap_BT.to(double), ratio_BT.to(double)
    mismatch = mismatch_BT.to(double).abs()
    low = (advantage_BT < 0) & (ratio_BT < 1 - clip.low)
    high = (advantage_BT > 0) & (ratio_BT > 1 + clip.high)
    dual = (advantage_BT < 0) & (ratio_BT > clip.dual) if clip.dual is not None else torch.zeros_like(low)
    importance = (log_ratio + gap).clamp(-20, 20).exp()
    bounded_log_ratio = log_ratio.clamp(-20, 20)
    if correction.mode == "mask":
        limited = correction_BT == 0
    elif correction.mode == "truncate":
        limited = correction_BT >= correction.cap
    else:
        limited = torch.zeros_like(low)
    nothing = torch.zeros_like(weight)
    terms = {
        "weight": torch.ones_like(weight),
        "clipped_low": low,
        "clipped_high": high,
        "clipped_dual": dual,
        "approx_kl": torch.expm1(bounded_log_ratio) - bounded_log_ratio,
        "ratio": ratio,
        "entropy": entropy_BT.to(double),
        "ref_kl": nothing if kl_BT is None else kl_BT.to(double),
        "mismatch": mismatch,
        "known": known_BT,
        "importance": importance,
        "importance_squared": importance.square(),
        "correction": correction_BT.to(double),
        "limited": limited,
    }
    sums = [(weight * terms[name]).sum() for name in SUM_NAMES if name in terms]
    sums += [mask_BT.sum().to(double), (mask_BT & ~known_BT).sum().to(double)]
    maxima = torch.stack([(ratio * mask_BT).max(), mismatch.max()]) if mask_BT.numel() else nothing.new_zeros(2)
    return MetricSums(torch.stack(sums), maxima)
