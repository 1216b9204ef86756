"""One policy's update from the store to the store: its own rows and the small tables in, version n+1 and figures out.

Runs on any machine that reaches the store. Nothing else of the run is opened: no query, no tool, no engine.
"""

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from infra.serving.core_share import cores
from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import PolicyStep
from infra.store.policies import (
    PolicyBase,
    PolicyVersion,
    fetch_version,
    find_sound_version,
    find_version,
    publish_version,
    require_version,
)
from infra.training.launch import train_in_processes
from infra.training.orders import UpdateOrder, require_same_inputs, update_order
from infra.training.sharded_job import ShardedJob
from infra.training.trainer import train_policy, update_settings
from infra.training.trajectory_share import training_trajectories
from mgrpo_core.config import RunConfig
from mgrpo_core.seeds import rng_of
from mgrpo_core.update.policy_gradient import Progress

__all__ = ["PolicyUpdate", "UpdateOrder", "carry_out", "find_update", "update_order"]

_FIGURES = "update.json"  # they travel with the version: an attempt may die before it writes them into the iteration


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What an update did: the policy's step for the manifest, and the file with its figures."""

    policy: str
    step: PolicyStep
    figures: FileRef


def find_update(files: StoreFiles, config: RunConfig, order: UpdateOrder) -> PolicyUpdate | None:
    """The update if it is done and recorded: its figures, and the version that they name. No weight is read."""
    path = layout.update_file(order.run, order.iteration, order.policy)
    if not files.exists(path):
        return None
    data = files.read(path)
    record = json.loads(data)
    if record["inputs_sha256"] != order.inputs_sha256:
        return None
    step = PolicyStep(**{name: record[name] for name in PolicyStep.__dataclass_fields__})
    made = find_version(files, order.run, order.policy, config.store_folder_of(order.policy), step.to_version)
    if made is None or made.sha256 != step.sha256:
        return None
    return PolicyUpdate(order.policy, step, FileRef(path, hashlib.sha256(data).hexdigest(), len(data)))


def carry_out(
    files: StoreFiles, config: RunConfig, order: UpdateOrder, cache: Path, on_progress: Progress | None = None
) -> PolicyUpdate:
    """Make version n+1 of a policy, or find it made from the same inputs; write the update's figures.

    In this process, or in `execution.update_processes` of their own, on the device of `training_device`. Where they
    are several, sums are rounded in another order; nothing else differs. A policy without a trajectory to train on
    keeps its version, weights and moments.

    Args:
        files: the store.
        config: the one that the order names.
        order: see there.
        cache: where versions are downloaded to from a store that is not local.
        on_progress: told about tokens done, and in all; what it raises ends the update.

    Raises:
        TableIntegrityError: this machine would compute something else than was ordered.
        NonFiniteError: a loss or gradient is not finite; nothing is written.
        InfrastructureError: a process of the update was lost.
    """
    policy, folder = order.policy, config.store_folder_of(order.policy)
    source = require_version(files, order.run, policy, folder, order.from_version)
    require_same_inputs(config, order, source)
    number = source.version + 1
    made = find_sound_version(files, order.run, policy, folder, number)
    if made is not None and made.inputs_sha256 == order.inputs_sha256:
        figures = json.loads((fetch_version(files, made, cache) / _FIGURES).read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="mgrpo-update-") as scratch:
            target = Path(scratch)
            job = _job(files, config, order, source, target, cache)
            figures = _train(files, job, on_progress)
            made = source
            if figures["optimizer_steps"]:
                (target / _FIGURES).write_text(json.dumps(figures, sort_keys=True), encoding="utf-8")
                made = publish_version(
                    files,
                    order.run,
                    policy,
                    folder,
                    number,
                    target,
                    parent_sha256=source.sha256,
                    inputs_sha256=order.inputs_sha256,
                    base=_base(config, policy, source),
                )
    step = PolicyStep(folder, source.version, made.version, made.sha256)
    record = {"policy": policy, "inputs_sha256": order.inputs_sha256, **asdict(step), "figures": figures}
    data = (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    return PolicyUpdate(policy, step, files.write(layout.update_file(order.run, order.iteration, policy), data))


def _base(config: RunConfig, policy: str, source: PolicyVersion) -> PolicyBase | None:
    """What an adapter made from `source` lies on; None where all weights are trained."""
    if config.policies[policy].lora is None:
        return None
    return source.base or PolicyBase(source.version, source.sha256)


def _job(
    files: StoreFiles, config: RunConfig, order: UpdateOrder, source: PolicyVersion, target: Path, cache: Path
) -> ShardedJob:
    reference = None
    if config.loss.kl.coefficient:
        reference = fetch_version(files, require_version(files, order.run, order.policy, source.folder, 0), cache)
    return ShardedJob(
        store=files.root if files.is_local else files.url,
        config=config,
        order=order,
        source=fetch_version(files, source, cache).absolute(),
        target=target,
        reference=None if reference is None else reference.absolute(),
    )


def _train(files: StoreFiles, job: ShardedJob, on_progress: Progress | None) -> dict[str, Any]:
    config, order = job.config, job.order
    processes = config.execution.update_processes.get(order.policy, 1)
    threads = config.execution.threads or max(1, cores() // max(1, len(config.trained_policies)))
    if processes > 1:
        return train_in_processes(job, processes, max(1, threads // processes), on_progress)
    torch.set_num_threads(threads)
    policy = config.policies[order.policy]
    metrics = train_policy(
        job.source,
        job.target,
        training_trajectories(files, config, order),
        policy,
        update_settings(config.loss, config.update, policy),
        rng=rng_of(config.seed, "update", order.iteration, order.policy),
        reference=job.reference,
        on_progress=on_progress,
    )
    return asdict(metrics)
