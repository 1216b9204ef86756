"""A policy's update again, from the stored version and tables to new weights and moments in a scratch folder."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.replay.sampler_logprobs import check_logprobs
from infra.replay.verdicts import Difference, Outcome, StageVerdict, unreadable
from infra.replay.weights import compare_versions
from infra.serving.core_share import cores
from infra.store.code_version import code_version
from infra.store.files import FileRef
from infra.store.layout import update_file
from infra.store.manifests import PolicyStep
from infra.store.policies import PolicyVersion, fetch_version, require_version
from infra.store.stored_iteration import StoredIteration
from infra.training.orders import UpdateOrder, update_order
from infra.training.trainer import train_policy, update_settings
from infra.training.trajectory_share import training_trajectories
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import MGRPOError, TableIntegrityError
from mgrpo_core.seeds import rng_of
from mgrpo_core.update.training_trajectory import TrainingTrajectory
from mgrpo_core.update.update_metrics import UpdateMetrics


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a policy's update started from: the stored version, downloaded and verified.

    Attributes:
        iteration: whose update it is.
        reference: folder of version 0, where the loss has a KL term.
    """

    iteration: int
    policy: str
    step: PolicyStep
    version: PolicyVersion
    source: Path
    reference: Path | None

    def rng(self, config: RunConfig) -> np.random.Generator:
        """The update's, from its beginning."""
        return rng_of(config.seed, "update", self.iteration, self.policy)


def replay_updates(stored: StoredIteration, cache: Path) -> Iterator[StageVerdict]:
    """Two verdicts a policy: its sampled tokens' log-probs, and, where it was trained, its update.

    Args:
        stored: the iteration.
        cache: where versions are downloaded to from a store that is not local.
    """
    for policy in stored.config.policies:
        stage = f"log-probs {policy}"
        try:
            inputs = policy_inputs(stored, stored.config, policy, cache)
            with update_threads(stored.config):
                yield check_logprobs(stored, policy, lambda version, own=inputs: _folder(stored, own, version, cache))
                if policy in stored.config.trained_policies:
                    stage = f"update {policy}"
                    yield _replay_update(stored, inputs, cache)
        except MGRPOError as error:
            yield unreadable(stage, error)


def policy_inputs(stored: StoredIteration, config: RunConfig, policy: str, cache: Path) -> PolicyInputs:
    """Raises: TableIntegrityError where a version is missing or damaged."""
    run, step = stored.manifest.run, stored.manifest.policies.get(policy)
    if step is None:
        raise TableIntegrityError(f"the manifest of iteration {stored.manifest.iteration} has no policy {policy!r}.")
    version = require_version(stored.files, run, policy, step.folder, step.from_version)
    reference = None
    if config.loss.kl.coefficient:
        reference = fetch_version(stored.files, require_version(stored.files, run, policy, step.folder, 0), cache)
    source = fetch_version(stored.files, version, cache)
    return PolicyInputs(stored.manifest.iteration, policy, step, version, source, reference)


def train_again(
    inputs: PolicyInputs, config: RunConfig, trajectories: list[TrainingTrajectory], target: Path
) -> UpdateMetrics:
    """The update's own path, in one process, into an empty folder."""
    policy = config.policies[inputs.policy]
    return train_policy(
        inputs.source,
        target,
        trajectories,
        policy,
        update_settings(config.loss, config.update, policy),
        rng=inputs.rng(config),
        reference=inputs.reference,
    )


def order_of(stored: StoredIteration, policy: str) -> UpdateOrder:
    """The order that the iteration gave for a policy."""
    step, advantages = stored.manifest.policies[policy], stored.ref("advantages.parquet")
    shards: Mapping[str, tuple[FileRef, ...]] = stored.all_shards()
    return update_order(stored.files, stored.config, stored.place, policy, step.from_version, shards, advantages)


def made_version(stored: StoredIteration, step: PolicyStep, policy: str) -> PolicyVersion:
    """The version that the iteration made.

    Raises: TableIntegrityError if it is missing, or another than the manifest says.
    """
    made = require_version(stored.files, stored.manifest.run, policy, step.folder, step.to_version)
    if made.sha256 != step.sha256:
        raise TableIntegrityError(
            f"version {step.to_version} of policy {policy!r} is {made.sha256[:12]}, the manifest says "
            f"{step.sha256[:12]}. One of the two was replaced; restore it from backup."
        )
    return made


@contextmanager
def update_threads(config: RunConfig) -> Iterator[None]:
    """As many as the run's update had: sums are rounded in the order that threads make of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.execution.threads or max(1, cores() // max(1, len(config.trained_policies))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _folder(stored: StoredIteration, inputs: PolicyInputs, version: int, cache: Path) -> Path:
    """Of a version of the same policy."""
    if version == inputs.step.from_version:
        return inputs.source
    found = require_version(stored.files, stored.manifest.run, inputs.policy, inputs.step.folder, version)
    return fetch_version(stored.files, found, cache)


def _replay_update(stored: StoredIteration, inputs: PolicyInputs, cache: Path) -> StageVerdict:
    stage, step = f"update {inputs.policy}", inputs.step
    order = order_of(stored, inputs.policy)
    record = json.loads(stored.files.read(update_file(*stored.place, inputs.policy)))
    made = made_version(stored, step, inputs.policy)
    same_code = stored.manifest.code_version == code_version()
    if same_code and record["inputs_sha256"] != order.inputs_sha256:
        words = f"{record['inputs_sha256'][:12]}", order.inputs_sha256[:12]
        return StageVerdict(stage, Outcome.DIFFERS, 1, "inputs", 1, first=Difference(None, None, "inputs", *words))
    with tempfile.TemporaryDirectory(prefix="mgrpo-replay-") as scratch:
        target = Path(scratch)
        trajectories = training_trajectories(stored.files, stored.config, order)
        metrics = train_again(inputs, stored.config, trajectories, target)
        if not metrics.optimizer_steps:
            verdict = _untrained(stage, step)
        elif step.to_version == step.from_version:
            words = "no step", f"{metrics.optimizer_steps} optimiser steps"
            verdict = StageVerdict(
                stage, Outcome.DIFFERS, 1, "versions", 1, first=Difference(None, None, "version", *words)
            )
        else:
            verdict = compare_versions(stage, fetch_version(stored.files, made, cache), target)
    return _with_figures(verdict, record["figures"], asdict(metrics))


def _untrained(stage: str, step: PolicyStep) -> StageVerdict:
    if step.to_version == step.from_version:
        return StageVerdict(stage, Outcome.EQUAL, 1, "versions", reason="nothing to train on: the version was kept")
    words = f"version {step.to_version}", "no step"
    return StageVerdict(stage, Outcome.DIFFERS, 1, "versions", 1, first=Difference(None, None, "version", *words))


def _with_figures(verdict: StageVerdict, stored: dict[str, Any], recomputed: dict[str, Any]) -> StageVerdict:
    """Losses, norms and counts of the update; they follow from what its weights do, and so are told after them."""
    if verdict.outcome is not Outcome.EQUAL:
        return verdict
    for name in sorted(stored.keys() | recomputed.keys()):
        theirs, ours = stored.get(name), recomputed.get(name)
        if theirs != ours:
            first = Difference(None, None, f"figure {name}", repr(theirs), repr(ours))
            return replace(verdict, outcome=Outcome.DIFFERS, differing=1, first=first)
    return verdict
