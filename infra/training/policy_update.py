"""One policy's update from the store to the store: its own rows and the small tables in, version n+1 and figures out.

Runs on any machine that reaches the store. Nothing else of the run is opened: no query, no tool, no engine.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.serving.core_share import cores
from infra.store import layout
from infra.store.code_version import code_version
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import PolicyStep
from infra.store.policies import (
    PolicyVersion,
    fetch_version,
    find_sound_version,
    find_version,
    publish_version,
    require_version,
)
from infra.store.schemas import ADVANTAGES, TRAJECTORIES
from infra.store.tables import read_table, stream_table
from infra.store.trajectory_rows import list_arrays
from infra.training.trainer import train_policy, update_settings
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import TableIntegrityError
from mgrpo_core.seeds import rng_of
from mgrpo_core.update.policy_gradient import Progress, TrainingTrajectory

_STREAM = ("trajectory_id", "token_ids", "loss_mask", "logprobs", "segment_starts", "temperature")
_CREDIT = ("trajectory_id", "agent", "advantage", "weight", "included")
_FIGURES = "update.json"  # they travel with the version: an attempt may die before it writes them into the iteration


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """Which update, by reference.

    Attributes:
        from_version: the version that sampled and is updated.
        config_sha256: of the config, under the run's `configs/`.
        trajectories: shards of the tables of the policy's trainable agents, by agent.
        advantages: the iteration's table of them.
        inputs_sha256: of everything that the new weights are a function of; whoever carries the order out must come
            to the same number.
    """

    run: str
    iteration: int
    policy: str
    from_version: int
    config_sha256: str
    trajectories: Mapping[str, tuple[FileRef, ...]]
    advantages: FileRef
    inputs_sha256: str


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What an update did: the policy's step for the manifest, and the file with its figures."""

    policy: str
    step: PolicyStep
    figures: FileRef


def update_order(
    files: StoreFiles,
    config: RunConfig,
    place: tuple[str, int],
    policy: str,
    from_version: int,
    trajectories: Mapping[str, tuple[FileRef, ...]],
    advantages: FileRef,
) -> UpdateOrder:
    """The order for one policy of an iteration.

    Args:
        files: the store.
        config: of the run.
        place: run and iteration.
        policy: which one.
        from_version: its version that sampled.
        trajectories: shards of all agents' tables; only the policy's own are kept.
        advantages: the iteration's table of them.
    """
    run, iteration = place
    own = {agent: tuple(trajectories[agent]) for agent in config.agents_of(policy)}
    source = require_version(files, run, policy, config.store_folder_of(policy), from_version)
    return UpdateOrder(
        run=run,
        iteration=iteration,
        policy=policy,
        from_version=from_version,
        config_sha256=config.sha256(),
        trajectories=own,
        advantages=advantages,
        inputs_sha256=_inputs_sha256(config, iteration, policy, source, own, advantages),
    )


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

    A policy without a trajectory to train on keeps its version, weights and moments.

    Args:
        files: the store.
        config: the one that the order names.
        order: see there.
        cache: where versions are downloaded to from a store that is not local.
        on_progress: told about tokens done, and in all.

    Raises:
        TableIntegrityError: this machine would compute something else than was ordered.
        NonFiniteError: a loss or gradient is not finite; nothing is written.
    """
    policy, folder = order.policy, config.store_folder_of(order.policy)
    torch.set_num_threads(config.execution.threads or max(1, cores() // max(1, len(config.trained_policies))))
    source = require_version(files, order.run, policy, folder, order.from_version)
    _require_same_inputs(config, order, source)
    number = source.version + 1
    made = find_sound_version(files, order.run, policy, folder, number)
    if made is not None and made.inputs_sha256 == order.inputs_sha256:
        figures = json.loads((fetch_version(files, made, cache) / _FIGURES).read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="mgrpo-update-") as scratch:
            target = Path(scratch)
            figures = _train(files, config, order, source, target, cache, on_progress)
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
                )
    step = PolicyStep(folder, source.version, made.version, made.sha256)
    record = {"policy": policy, "inputs_sha256": order.inputs_sha256, **asdict(step), "figures": figures}
    data = (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    return PolicyUpdate(policy, step, files.write(layout.update_file(order.run, order.iteration, policy), data))


def _train(
    files: StoreFiles,
    config: RunConfig,
    order: UpdateOrder,
    source: PolicyVersion,
    target: Path,
    cache: Path,
    on_progress: Progress | None,
) -> dict[str, Any]:
    policy = config.policies[order.policy]
    reference = None
    if config.loss.kl.coefficient:
        reference = fetch_version(files, require_version(files, order.run, order.policy, source.folder, 0), cache)
    metrics = train_policy(
        fetch_version(files, source, cache),
        target,
        training_trajectories(files, config, order),
        policy,
        update_settings(config.loss, config.update, policy),
        rng=rng_of(config.seed, "update", order.iteration, order.policy),
        reference=reference,
        on_progress=on_progress,
    )
    return asdict(metrics)


def training_trajectories(files: StoreFiles, config: RunConfig, order: UpdateOrder) -> list[TrainingTrajectory]:
    """Rows of the policy's trainable agents that carry signal. No other agent's tokens are read."""
    agents = config.agents_of(order.policy)
    credit: Mapping[str, dict[str, Any]] = {
        row["trajectory_id"]: row
        for row in read_table(files, order.advantages.path, ADVANTAGES, _CREDIT).to_pylist()
        if row["included"] and row["agent"] in agents
    }
    chosen: list[TrainingTrajectory] = []
    for ref in (ref for agent in agents for ref in order.trajectories[agent]):
        for group in stream_table(files, ref.path, TRAJECTORIES, _STREAM):
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


def _require_same_inputs(config: RunConfig, order: UpdateOrder, source: PolicyVersion) -> None:
    here = _inputs_sha256(config, order.iteration, order.policy, source, order.trajectories, order.advantages)
    if here != order.inputs_sha256:
        raise TableIntegrityError(
            f"update of policy {order.policy!r}, iteration {order.iteration} of run {order.run!r}: this machine comes "
            f"to inputs {here[:12]}, {order.inputs_sha256[:12]} were ordered. Its code is {code_version()}: most "
            "likely the iteration's machine runs another version of mgrpo, or the policy's version was replaced. "
            "Install the same version on both, and start the iteration again."
        )


def _inputs_sha256(
    config: RunConfig,
    iteration: int,
    policy: str,
    source: PolicyVersion,
    trajectories: Mapping[str, tuple[FileRef, ...]],
    advantages: FileRef,
) -> str:
    """Hash of everything that the new weights are a function of."""
    inputs = {
        "source": source.sha256,
        "advantages": advantages.sha256,
        "trajectories": {agent: [ref.sha256 for ref in refs] for agent, refs in trajectories.items()},
        "optimizer": config.policies[policy].model_dump(mode="json"),
        "loss": config.loss.model_dump(mode="json"),
        "update": config.update.model_dump(mode="json"),
        "seed": config.seed,
        "iteration": iteration,
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
