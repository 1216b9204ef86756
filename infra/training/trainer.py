"""From one policy version to the next: load, one M-GRPO update, save weights and trainer state."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from infra.store.adapter_folder import is_adapter, whole_folder
from infra.training.adapters import save_adapter, trained_parameters
from infra.training.device import training_device
from infra.training.load_policy import load_model, load_trained
from infra.training.no_progress_bar import no_progress_bar
from infra.training.optimizer_state import TRAINER_FILES, load_optimizer, save_optimizer
from infra.training.process_ranks import ProcessRanks
from infra.training.sharding import shard, whole_weights
from mgrpo_core.config import LoraConfig, LossConfig, OptimizerConfig, PolicyConfig, UpdateConfig
from mgrpo_core.update.loss_settings import ClipRange, Correction, KLPenalty, LossSettings
from mgrpo_core.update.policy_gradient import (
    Progress,
    TrainingTrajectory,
    UpdateMetrics,
    UpdateSettings,
    policy_gradient,
)
from mgrpo_core.update.schedule import learning_rate

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", *TRAINER_FILES, "version.json")


def train_policy(
    source: Path,
    target: Path,
    trajectories: Sequence[TrainingTrajectory],
    policy: PolicyConfig,
    settings: UpdateSettings,
    *,
    rng: np.random.Generator,
    reference: Path | None = None,
    on_progress: Progress | None = None,
    ranks: ProcessRanks | None = None,
    all_ids: Sequence[str] | None = None,
) -> UpdateMetrics:
    """Update the policy in `source` on `trajectories`; write the new version into the empty folder `target`.

    Masters, moments and saved weights are float32 whatever the policy computes in: updates below half a bfloat16
    spacing would round away. A target is written only if an optimiser step was taken; the metrics say how many. With
    `policy.lora` it holds an adapter and the adapter's moments, and the weights below it stay those of the source.

    Args:
        source: a Hugging Face folder, with trainer state unless it is a version 0; or an adapter on one.
        target: an existing empty folder.
        trajectories: distinct ones of this policy, with advantage and weight.
        policy: how it is optimised.
        settings: how trajectories become optimiser steps; from `update_settings`.
        rng: seeded from the keys of the update.
        reference: folder of the reference policy, where the loss has a KL term.
        on_progress: told about tokens done.
        ranks: the processes that share the update, each with trajectories of its own; all of them call this, and the
            first one writes.
        all_ids: with ranks: ids of the trajectories of all of them.

    Raises:
        NonFiniteError: a loss or gradient is not finite; nothing is written.
        ConfigError, TableIntegrityError: the source cannot be read.
    """
    model = load_trained(source, policy.lora, torch.float32, adapter_seed(policy, rng))
    in_training = _placed(model, settings, ranks)
    optimizer = _optimizer(model, policy.optimizer)
    # Moments of whole weights are none for an adapter, nor the other way round: they begin anew.
    goes_on = is_adapter(source) == (policy.lora is not None)
    steps_before = load_optimizer(source, optimizer, model) if goes_on else 0
    scheduler = LambdaLR(optimizer, _rate_from(steps_before, policy.optimizer))
    metrics = policy_gradient(
        in_training,
        trajectories,
        optimizer,
        settings,
        rng=rng,
        scheduler=scheduler,
        reference=_placed(load_model(reference, torch.float32), settings, ranks) if reference else None,
        on_progress=on_progress,
        ranks=ranks,
        all_ids=all_ids,
    )
    if metrics.optimizer_steps:
        writes = ranks is None or ranks.index == 0
        _save_weights(model, source, target if writes else None, policy.lora, sharded=ranks is not None)
        save_optimizer(target if writes else None, optimizer, model, steps_before + metrics.optimizer_steps)
    return metrics


def adapter_seed(policy: PolicyConfig, rng: np.random.Generator) -> int:
    """Seed of a policy's first adapter: the first number that an update draws, whether it begins one or goes on."""
    return int(rng.integers(2**63)) if policy.lora is not None else 0


def update_settings(loss: LossConfig, update: UpdateConfig, policy: PolicyConfig) -> UpdateSettings:
    """The core's settings from the sections of a config."""
    return UpdateSettings(
        loss=LossSettings(
            ratio=loss.ratio,
            clip=ClipRange(loss.clip_low, loss.clip_high, loss.dual_clip),
            reduction=loss.reduction,
            constant_length=loss.constant_length if loss.reduction == "constant" else None,
            kl=KLPenalty(loss.kl.coefficient, loss.kl.estimator),
            correction=Correction(loss.correction.mode, loss.correction.level, loss.correction.cap),
            entropy_bonus=loss.entropy_bonus,
        ),
        optimizer_steps=update.optimizer_steps,
        epochs=update.epochs,
        micro_batch_tokens=update.micro_batch_tokens,
        old_logprobs=update.old_logprobs,
        max_grad_norm=policy.optimizer.max_grad_norm,
        compute_dtype=policy.dtype,
    )


def _placed(model: PreTrainedModel, settings: UpdateSettings, ranks: ProcessRanks | None) -> torch.nn.Module:
    """The model where it is trained, in one piece or this rank's parts; its own parameters become those."""
    return cast("Any", model).to(training_device()) if ranks is None else shard(model, settings, ranks.mesh)


def _optimizer(model: torch.nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; norms and biases are not decayed, as is usual and as the released code's framework does."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def _rate_from(steps_before: int, settings: OptimizerConfig) -> Callable[[int], float]:
    """Factor on the base rate at the k-th step of this update."""

    def factor(step: int) -> float:
        rate = learning_rate(
            steps_before + step,
            base=settings.lr,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
        )
        return rate / settings.lr

    return factor


def _save_weights(
    model: PreTrainedModel, source: Path, target: Path | None, lora: LoraConfig | None, *, sharded: bool
) -> None:
    """Write what was trained: all weights, with what lies beside them, or an adapter alone. Every rank calls it."""
    if lora is not None:
        trained = trained_parameters(model)
        weights = whole_weights(trained, keep=target is not None) if sharded else dict(trained)
        if target is not None:
            save_adapter(target, lora, weights)
        return
    weights = whole_weights(model.state_dict(keep_vars=True), keep=target is not None) if sharded else None
    if target is not None:
        with no_progress_bar():
            model.save_pretrained(target, state_dict=weights)
        _copy_what_training_leaves_alone(whole_folder(source), target)


def _copy_what_training_leaves_alone(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config, byte for byte: re-saving a tokenizer may rewrite it."""
    trained = {path for pattern in _WEIGHT_FILES for path in source.glob(pattern)}
    for path in sorted(source.iterdir()):
        if path.is_file() and path not in trained and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
