"""The update of one policy under another config: its gradient, its new weights, and how far they end from the run's."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from infra.replay.policy_changes import PolicyChange
from infra.replay.policy_logprobs import logprobs_under, sampled_trajectories
from infra.replay.updates import PolicyInputs, made_version, policy_inputs, train_again, update_threads
from infra.store.adapter_folder import is_adapter, link_base, whole_folder
from infra.store.layout import update_file
from infra.store.policies import fetch_version
from infra.store.stored_iteration import StoredIteration
from infra.training.device import training_device
from infra.training.load_policy import load_model, load_trained
from infra.training.trainer import adapter_seed, update_settings
from mgrpo_core.config import RunConfig
from mgrpo_core.update.gradient_shares import Gradient, LossGradient, gradient_cosine, gradient_norm
from mgrpo_core.update.training_trajectory import TrainingTrajectory

_CREDIT = ("trajectory_id", "agent", "advantage", "weight", "included")
_BOUND = 20.0  # of a log-ratio, as in the update's own figures


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """What the run's update did.

    Attributes:
        inputs: what it started from.
        made: folder of the version that it made, or kept.
        gradient: of the iteration's loss at the version that is updated, by parameter, on the CPU; None without signal.
        clip_fraction: of its figures.
    """

    inputs: PolicyInputs
    made: Path
    gradient: Gradient | None
    clip_fraction: float


def stored_update(stored: StoredIteration, policy: str, cache: Path) -> StoredUpdate:
    """Raises: TableIntegrityError where a version or a table is missing or damaged."""
    config = stored.config
    inputs = policy_inputs(stored, config, policy, cache)
    record = json.loads(stored.files.read(update_file(*stored.place, policy)))
    made = fetch_version(stored.files, made_version(stored, inputs.step, policy), cache)
    trajectories = credited(stored, config, policy, stored.table("advantages", _CREDIT))
    with update_threads(config):
        gradient = gradient_of(inputs, config, trajectories)
    return StoredUpdate(inputs, made, gradient, _clip_fraction(record["figures"]))


def policy_change(
    stored: StoredIteration, update: StoredUpdate, config: RunConfig, advantages: pa.Table, cache: Path
) -> PolicyChange:
    """Make the update under another config, in a scratch folder, and compare.

    Args:
        stored: the iteration.
        update: the run's.
        config: the variation's.
        advantages: its table of them.
        cache: where versions are downloaded to.
    """
    policy = update.inputs.policy
    inputs = policy_inputs(stored, config, policy, cache)
    trajectories = credited(stored, config, policy, advantages)
    with update_threads(config), tempfile.TemporaryDirectory(prefix="mgrpo-replay-") as scratch:
        gradient = gradient_of(inputs, config, trajectories)
        metrics = train_again(inputs, config, trajectories, Path(scratch))
        updated = Path(scratch) if metrics.optimizer_steps else inputs.source
        if is_adapter(Path(scratch)):
            link_base(Path(scratch), whole_folder(inputs.source))
        kl = approx_kl(stored, policy, update.made, updated)
    return PolicyChange(
        policy=policy,
        cosine=None if update.gradient is None or gradient is None else gradient_cosine(update.gradient, gradient),
        stored_norm=_norm(update.gradient),
        norm=_norm(gradient),
        stored_clip_fraction=update.clip_fraction,
        clip_fraction=metrics.clip_fraction_low + metrics.clip_fraction_high + metrics.clip_fraction_dual,
        optimizer_steps=metrics.optimizer_steps,
        approx_kl=kl,
    )


def credited(stored: StoredIteration, config: RunConfig, policy: str, advantages: pa.Table) -> list[TrainingTrajectory]:
    """What a policy's update trains on, with the credit of some advantages table."""
    agents = config.agents_of(policy)
    credit = {
        row["trajectory_id"]: row
        for row in advantages.select(_CREDIT).to_pylist()
        if row["included"] and row["agent"] in agents
    }
    return [
        replace(one.trajectory, advantage=row["advantage"], weight=row["weight"])
        for group in sampled_trajectories(stored, agents)
        for one in group
        if (row := credit.get(one.trajectory.trajectory_id)) is not None
    ]


def gradient_of(inputs: PolicyInputs, config: RunConfig, trajectories: Sequence[TrainingTrajectory]) -> Gradient | None:
    """Gradient of the loss over all trajectories as one batch, at the version that is updated; None without signal."""
    loss = loss_gradient(inputs, config, trajectories)
    return loss.whole() if loss.has_signal else None


def loss_gradient(inputs: PolicyInputs, config: RunConfig, trajectories: Sequence[TrainingTrajectory]) -> LossGradient:
    """The loss of an update, at the version that is updated."""
    policy = config.policies[inputs.policy]
    settings = update_settings(config.loss, config.update, policy)
    reference = None if inputs.reference is None else _loaded(inputs.reference)
    seed = adapter_seed(policy, inputs.rng(config))
    model = cast("Any", load_trained(inputs.source, policy.lora, torch.float32, seed)).to(training_device())
    return LossGradient(model, reference, trajectories, settings)


def approx_kl(stored: StoredIteration, policy: str, one: Path, other: Path) -> float:
    """See `PolicyChange.approx_kl`: of `other` to `one`, over the sampled tokens of the policy's trainable agents."""
    config = stored.config
    models = _loaded(one), _loaded(other)
    total, tokens = 0.0, 0
    for group in sampled_trajectories(stored, config.agents_of(policy)):
        trajectories = [sampled.trajectory for sampled in group]
        scores = [logprobs_under(model, trajectories, config, policy) for model in models]
        for base_T, new_T in zip(*scores, strict=True):
            ratio_T = np.clip((new_T - base_T)[~np.isnan(base_T)], -_BOUND, _BOUND)
            total += float((np.expm1(ratio_T) - ratio_T).sum())
            tokens += len(ratio_T)
    return total / tokens if tokens else 0.0


def _loaded(folder: Path) -> nn.Module:
    return cast("Any", load_model(folder, torch.float32)).to(training_device())


def _norm(gradient: Gradient | None) -> float:
    return 0.0 if gradient is None else gradient_norm(gradient)


def _clip_fraction(figures: dict[str, float]) -> float:
    return sum(figures[f"clip_fraction_{bound}"] for bound in ("low", "high", "dual"))
