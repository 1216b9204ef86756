"""Policies: the LLMs, and how each is optimised."""

from typing import Literal

from pydantic import Field

from mgrpo_core.config.strict import Section

LOCAL_SERVER = "local"
"""Stands among a policy's `servers` for one on this machine that mgrpo starts, on a free port, and stops."""


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


class LoraConfig(Section):
    """An adapter on frozen weights (LoRA): W x + alpha/rank * B A x, B = 0 at first. It alone is stepped and stored.

    There is no dropout: the ratio compares two passes of one policy, and must be 1 before the first step.
    """

    rank: int = Field(default=16, ge=1, le=512)
    """Rows of A and columns of B. 512: the most that vLLM serves."""
    alpha: float = Field(default=32.0, gt=0)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the layers' linear maps that get one (all of them: LoRA without regret, Schulman et al. 2025)."""


class ServingConfig(Section):
    """How a policy's servers are asked. None of it decides what is computed."""

    concurrency: int = Field(default=128, ge=1)
    """Requests in flight at one server; the others wait their turn."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one answer."""
    deadline_s: float = Field(default=120.0, gt=0)
    """How long servers that fail are asked again before a turn is lost (120: vLLM restarts in 30 to 60 s)."""
    start_deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait for a server that mgrpo starts itself."""
    folder: str | None = None
    """Where versions are laid out for servers, a path that they read, too; None = a folder of this machine."""
    transfer: Literal["folder", "nccl"] = "folder"
    """How all weights come to servers: read by them from `folder`, or sent by NCCL from a GPU of this machine."""


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
    servers: tuple[str, ...] = ()
    """Its vLLM servers, equal among each other: URLs, or `local` for one that mgrpo starts; none = in this process."""
    serving: ServingConfig = ServingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights; None = all weights."""
