"""How an iteration's trajectories become optimiser steps."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mgrpo_core.errors import ConfigError
from mgrpo_core.update.logprobs import LOGITS_AT_ONCE
from mgrpo_core.update.loss_settings import LossSettings
from mgrpo_core.update.packing import PaddingSide

OldLogprobs = Literal["trainer", "sampler"]
ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of `policy_gradient`.

    Attributes:
        loss: what is minimised.
        optimizer_steps: minibatches of an epoch, one optimiser step each. 1: the released M-GRPO code.
        epochs: passes over the trajectories. 1: the same.
        micro_batch_tokens: tokens computed at once, padding included: a matter of memory, never of the result.
        old_logprobs: denominator of the ratio. `trainer`: recomputed by the policy before its first step (released
            code); with a single step that is the detached current value, at no cost. `sampler`: as the sampler reported
            them.
        max_grad_norm: gradients are scaled down to this L2 norm.
        compute_dtype: `bfloat16` computes under autocast; weights, moments and statistics keep their dtype (float32).
        padding_side: where padding goes; no matter to the result.
        logits_at_once: positions x vocabulary held at a time.
    """

    loss: LossSettings = field(default_factory=LossSettings)
    optimizer_steps: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 16384
    old_logprobs: OldLogprobs = "trainer"
    max_grad_norm: float = 1.0
    compute_dtype: ComputeDtype = "float32"
    padding_side: PaddingSide = "right"
    logits_at_once: int = LOGITS_AT_ONCE

    def __post_init__(self) -> None:
        for name in ("optimizer_steps", "epochs", "micro_batch_tokens", "logits_at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"UpdateSettings: {name} is {getattr(self, name)}, expected 1 or more.")
        if not self.max_grad_norm > 0:
            raise ConfigError(f"UpdateSettings: max_grad_norm is {self.max_grad_norm}, expected more than 0.")
        for name, choices in (
            ("old_logprobs", get_args(OldLogprobs)),
            ("compute_dtype", get_args(ComputeDtype)),
            ("padding_side", get_args(PaddingSide)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"UpdateSettings: {name} is {getattr(self, name)!r}, expected {' or '.join(choices)}."
                )
