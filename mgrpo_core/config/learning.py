"""Credit and update: from rewards to gradients."""

from typing import Literal

from pydantic import Field, model_validator

from mgrpo_core.config.strict import Section


class AlignmentConfig(Section):
    """How a rollout's d_k sub-trajectories become d."""

    mode: Literal["random", "weighted", "none"] = "random"
    """random: duplicate or drop (M-GRPO §4.1); weighted: each once, with weight d/d_k; none: each once (ablation)."""


class AdvantageConfig(Section):
    """What a reward is compared with."""

    normalization: Literal["population", "sample", "center", "leave_one_out", "batch_std"] = "population"
    """population: M-GRPO Eq. 9-13; center: Dr. GRPO; leave_one_out: RLOO."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation; the paper has none."""


class KLConfig(Section):
    """Pull towards version 0 of the policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """0: neither the paper nor its code uses one."""
    estimator: Literal["k1", "k2", "k3", "k3_ratio"] = "k3_ratio"
    """Value and gradient differ: see `mgrpo_core.update.loss`."""


class CorrectionConfig(Section):
    """Importance correction for the gap between the sampler's and the trainer's log-probs."""

    mode: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence"] = "token"
    cap: float = Field(default=2.0, gt=1)


class LossConfig(Section):
    """The clipped surrogate and its companions."""

    ratio: Literal["token", "sequence"] = "token"
    """token: released code; sequence: length-normalised (GSPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    """0.2 and 0.28: the only published values."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of a negative advantage, times |advantage|; None = off."""
    reduction: Literal["trajectory_mean", "token_mean", "constant"] = "trajectory_mean"
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor of the `constant` reduction (Dr. GRPO)."""
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    entropy_bonus: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _constant_has_a_length(self) -> "LossConfig":
        if self.reduction == "constant" and self.constant_length is None:
            raise ValueError(
                "loss.constant_length: missing. The reduction `constant` divides by it; give a token count."
            )
        return self


class UpdateConfig(Section):
    """How one iteration's trajectories become optimiser steps."""

    optimizer_steps: int = Field(default=1, ge=1)
    """Minibatches of an iteration, one optimiser step each (1: the released code)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the iteration's trajectories."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Tokens computed at once, padding included: a matter of memory, never of the result."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer before the first step, or as the sampler reported them."""
