"""An update as a run leaves it in the store: a tiny policy, its trajectories, their advantages, and the order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.policies import publish_version
from infra.store.runs import create_or_open_run
from infra.store.schemas import ADVANTAGES, TRAJECTORIES
from infra.store.tables import table_of, table_writer, write_table
from infra.store.trajectory_rows import trajectories_table
from infra.training.policy_update import UpdateOrder, update_order
from mgrpo_core.config import RunConfig
from mgrpo_core.trajectories import PathStep, Trajectory, TrajectoryKey
from tests.infra.store.small_run import config, trajectory

RUN, POLICY = "r", "main"


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    files: StoreFiles
    config: RunConfig
    order: UpdateOrder


def config_of(processes: int, *, steps: int = 2, epochs: int = 1, kl: float = 0.0) -> RunConfig:
    """The main policy's update on so many processes."""
    optimizer = {"lr": 1e-3, "max_grad_norm": 0.05}  # a norm that binds: it must be that of all the ranks
    return config(
        policies={"main": {"init": "a", "optimizer": optimizer}, "sub": {"init": "b"}},
        loss={"kl": {"coefficient": kl}},
        update={"optimizer_steps": steps, "epochs": epochs, "micro_batch_tokens": 64},
        execution={"mode": "work_pools", "update_processes": {POLICY: processes}, "threads": 1},
    )


def save_policy(folder: Path, seed: int = 0) -> Path:
    """Tied embeddings, two layers, and 1000 tokens, which two ranks share evenly; one norm is of odd length."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = Qwen3Config(
        vocab_size=1000, head_dim=32, intermediate_size=48, tie_word_embeddings=True, initializer_range=0.2, **shape
    )
    Qwen3ForCausalLM(made).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("as it was")
    return folder


def store_run(files: StoreFiles, settings: RunConfig, scratch: Path) -> None:
    """A run with version 0 of the policy."""
    create_or_open_run(files, RUN, settings)
    folder = save_policy(scratch / "version-0")
    publish_version(files, RUN, POLICY, POLICY, 0, folder, parent_sha256=None, inputs_sha256="initial weights")


def trajectories_of(iteration: int, lengths: Sequence[int]) -> list[Trajectory]:
    keys = [TrajectoryKey(RUN, iteration, f"q{index}", 0, (PathStep("main", 0),)) for index in range(len(lengths))]
    return [trajectory(key, tokens=tokens) for key, tokens in zip(keys, lengths, strict=True)]


def store_update(
    files: StoreFiles, settings: RunConfig, lengths: Sequence[int], advantages: Sequence[float], iteration: int = 0
) -> StoredUpdate:
    """Tables of an iteration, a row group for each trajectory, and the order to update version `iteration`."""
    rows = trajectories_of(iteration, lengths)
    path = layout.trajectories_file(RUN, iteration, "main", 0)
    with table_writer(files, path, TRAJECTORIES) as writer:
        for row in rows:
            writer.write(trajectories_table([(0, row)]))
            writer.flush()
    count = len(rows)
    columns = {
        "trajectory_id": [row.trajectory_id for row in rows],
        "agent": ["main"] * count,
        "policy": [POLICY] * count,
        "query_id": [row.key.query_id for row in rows],
        "reward": [0.5] * count,
        "weight": [1.0 + index % 2 for index in range(count)],
        "advantage": list(advantages),
        "group_mean": [0.5] * count,
        "group_std": [0.5] * count,
        "group_size": [count] * count,
        "included": [True] * count,
        "excluded_reason": [None] * count,
    }
    table = write_table(
        files, layout.table_file(RUN, iteration, "advantages"), ADVANTAGES, table_of(ADVANTAGES, columns)
    )
    shards = {"main": (writer.ref,)}
    order = update_order(files, settings, (RUN, iteration), POLICY, iteration, shards, table)
    return StoredUpdate(files, settings, order)
