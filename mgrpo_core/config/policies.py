"""Policies: the LLMs, and how each is optimised."""

from typing import Literal

from pydantic import Field

from mgrpo_core.config.strict import Section


class OptimizerConfig(Section):
    """AdamW on float32 master weights."""

    lr: float = Field(default=1e-6, gt=0)
    """1e-6: the only published value, for full fine-tuning of 30B; small models want more."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """(0.9, 0.98) and 0.1: the released M-GRPO code."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps until a linear or cosine schedule reaches 0."""


class PolicyConfig(Section):
    """One LLM, updated on its own."""

    init: str
    """Version 0: a Hugging Face folder, or `builtin:quickstart/main` for one that mgrpo ships."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; masters, moments and statistics are float32 whatever this says."""
    context: int | None = Field(default=None, ge=16)
    """Most tokens of a prompt and its completion; None = what the model was built for."""
    store_as: str | None = None
    """Folder under the run's `policies/`; None = the policy's name."""
    optimizer: OptimizerConfig = OptimizerConfig()
