"""Which update, by reference: what a machine needs to know to carry it out, and nothing of what it reads."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from infra.store.code_version import code_version
from infra.store.files import FileRef, StoreFiles
from infra.store.policies import PolicyVersion, require_version
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import TableIntegrityError


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """Which update, by reference.

    Attributes:
        from_version: the version that is updated.
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
        from_version: its version that is updated.
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


def require_same_inputs(config: RunConfig, order: UpdateOrder, source: PolicyVersion) -> None:
    """Raises: TableIntegrityError where this machine would compute something else than was ordered."""
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
