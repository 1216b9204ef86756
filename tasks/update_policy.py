"""Stage: one policy's update, from its own rows and the small tables alone; on any machine that reaches the store."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.resources import RunResources
from infra.serving.core_share import cores
from infra.store import layout
from infra.store.code_version import code_version
from infra.store.files import FileRef
from infra.store.manifests import PolicyStep
from infra.store.policies import PolicyVersion, find_sound_version, publish_version
from infra.store.schemas import ADVANTAGES, TRAJECTORIES
from infra.store.tables import read_table, stream_table
from infra.store.trajectory_rows import list_arrays
from infra.training.trainer import train_policy, update_settings
from mgrpo_core.seeds import rng_of
from mgrpo_core.update.policy_gradient import Progress, TrainingTrajectory
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables

_STREAM = ("trajectory_id", "token_ids", "loss_mask", "logprobs", "segment_starts", "temperature")
_CREDIT = ("trajectory_id", "agent", "advantage", "weight", "included")


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What an update did: the policy's step for the manifest, and the file with its figures."""

    policy: str
    step: PolicyStep
    figures: FileRef


@stage(task_run_name="update_policy-{policy}")
async def update_policy(
    resources: RunResources, at: IterationRef, policy: str, tables: TrajectoryTables, advantages: FileRef
) -> PolicyUpdate:
    """Make version n+1 of a policy, or find it made from the same inputs; write the update's figures.

    A policy without a trajectory to train on keeps its version, weights and moments.
    """
    with resources.progress.bar(f"update · {policy}", 1, "tokens") as bar:
        return await asyncio.to_thread(_update, resources, at, policy, tables, advantages, bar.move)


def _update(
    resources: RunResources,
    at: IterationRef,
    policy: str,
    tables: TrajectoryTables,
    advantages: FileRef,
    on_progress: Progress,
) -> PolicyUpdate:
    config, files = resources.config, resources.files
    torch.set_num_threads(config.execution.threads or max(1, cores() // max(1, len(config.trained_policies))))
    folder = config.store_folder_of(policy)
    source = resources.version(policy, at.versions[policy])
    inputs = _inputs_sha256(resources, at, policy, source, tables, advantages)
    figures_path = layout.update_file(at.run, at.iteration, policy)
    target_number = source.version + 1

    made = find_sound_version(files, at.run, policy, folder, target_number)
    if made is not None and made.inputs_sha256 == inputs:
        # The step was taken by an attempt that died afterwards; its figures travel with the version.
        figures = json.loads((resources.folder(policy, target_number) / "update.json").read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="mgrpo-update-") as scratch:
            target = Path(scratch)
            metrics = train_policy(
                resources.folder(policy, source.version),
                target,
                _training_trajectories(resources, policy, tables, advantages),
                config.policies[policy],
                update_settings(config.loss, config.update, config.policies[policy]),
                rng=rng_of(config.seed, "update", at.iteration, policy),
                reference=resources.folder(policy, 0) if config.loss.kl.coefficient else None,
                on_progress=on_progress,
            )
            figures = asdict(metrics)
            if metrics.optimizer_steps:
                (target / "update.json").write_text(json.dumps(figures, sort_keys=True), encoding="utf-8")
                made = publish_version(
                    files,
                    at.run,
                    policy,
                    folder,
                    target_number,
                    target,
                    parent_sha256=source.sha256,
                    inputs_sha256=inputs,
                )
            else:
                made = source
    step = PolicyStep(folder, source.version, made.version, made.sha256)
    record = {"policy": policy, "inputs_sha256": inputs, **asdict(step), "figures": figures}
    data = (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    return PolicyUpdate(policy, step, files.write(figures_path, data))


def _training_trajectories(
    resources: RunResources, policy: str, tables: TrajectoryTables, advantages: FileRef
) -> list[TrainingTrajectory]:
    """Rows of the policy's trainable agents that carry signal. No other agent's tokens are read."""
    agents = resources.config.agents_of(policy)
    credit: Mapping[str, dict[str, Any]] = {
        row["trajectory_id"]: row
        for row in read_table(resources.files, advantages.path, ADVANTAGES, _CREDIT).to_pylist()
        if row["included"] and row["agent"] in agents
    }
    chosen: list[TrainingTrajectory] = []
    for path in (path for agent in agents for path in tables.paths(agent)):
        for group in stream_table(resources.files, path, TRAJECTORIES, _STREAM):
            ids = group.column("trajectory_id").to_pylist()
            chosen_rows = [index for index, one in enumerate(ids) if one in credit]
            rows = group.take(np.array(chosen_rows, dtype=np.int64))  # typed: an empty list would be of type null
            tokens, masks, logprobs, starts = (list_arrays(rows.column(name)) for name in _STREAM[1:5])
            kept = rows.column("trajectory_id").to_pylist()
            temperatures = rows.column("temperature").to_pylist()
            for index, trajectory_id in enumerate(kept):
                chosen.append(
                    TrainingTrajectory(
                        trajectory_id=trajectory_id,
                        token_ids=tokens[index],
                        loss_mask=masks[index].astype(np.bool_),
                        sampler_logprobs=logprobs[index].astype(np.float32),
                        segment_starts=tuple(starts[index].tolist()),
                        temperature=temperatures[index],
                        advantage=credit[trajectory_id]["advantage"],
                        weight=credit[trajectory_id]["weight"],
                    )
                )
    return chosen


def _inputs_sha256(
    resources: RunResources,
    at: IterationRef,
    policy: str,
    source: PolicyVersion,
    tables: TrajectoryTables,
    advantages: FileRef,
) -> str:
    """Hash of everything that the new weights are a function of."""
    config = resources.config
    agents = config.agents_of(policy)
    inputs = {
        "source": source.sha256,
        "advantages": advantages.sha256,
        "trajectories": {agent: [ref.sha256 for ref in tables.shards[agent]] for agent in agents},
        "optimizer": config.policies[policy].model_dump(mode="json"),
        "loss": config.loss.model_dump(mode="json"),
        "update": config.update.model_dump(mode="json"),
        "seed": config.seed,
        "iteration": at.iteration,
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
