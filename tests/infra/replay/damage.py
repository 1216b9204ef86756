"""Damage to a stored run of the small team: each kind changes one thing, as a hand or a disk would."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from mgrpo_core.config import RunConfig
from tests.flows.stored import iteration_folder

ITERATION = 1
"""The one that is damaged, of three."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Where a replay must say that the fault is, and what it must name there."""

    stage: str
    words: tuple[str, ...]


@contextmanager
def rows_of(path: Path) -> Iterator[Rows]:
    """Rows of a table, written back as they are at the end of the block."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    yield rows
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


@contextmanager
def json_of(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file, written back likewise."""
    raw = json.loads(path.read_text())
    yield raw
    path.write_text(json.dumps(raw, sort_keys=True, indent=1) + "\n")


def folder(store: Path) -> Path:
    return iteration_folder(store, ITERATION)


def flipped_bit_in_a_logprob(store: Path) -> Expected:
    with rows_of(folder(store) / "trajectories/main-0000.parquet") as rows:
        row, logprobs = rows[2], rows[2]["logprobs"]
        token = int(np.argmin([0.0 if one is None else one for one in logprobs]))
        bits = np.array([logprobs[token]], dtype=np.float32).view(np.int32) ^ np.int32(1 << 23)  # of the exponent
        logprobs[token] = float(bits.view(np.float32)[0])
    return Expected("log-probs main", ("main", row["trajectory_id"], f"log-prob of token {token}"))


def changed_token(store: Path) -> Expected:
    with rows_of(folder(store) / "trajectories/main-0000.parquet") as rows:
        row = rows[3]
        token = row["loss_mask"].index(True)
        row["token_ids"][token] += 1
    return Expected("log-probs main", (row["trajectory_id"], f"log-prob of token {token}"))


def another_reward(store: Path) -> Expected:
    with rows_of(folder(store) / "rewards.parquet") as rows:
        row = rows[4]
        row["reward"] += 0.25
    return Expected("rewards", (row["agent"], row["trajectory_id"], "column reward", repr(row["reward"])))


def swapped_row(store: Path) -> Expected:
    with rows_of(folder(store) / "rewards.parquet") as rows:
        rows[1], rows[5] = rows[5], rows[1]
    return Expected("rewards", ("column trajectory_id", rows[1]["trajectory_id"], rows[5]["trajectory_id"]))


def lost_row(store: Path) -> Expected:
    with rows_of(folder(store) / "rewards.parquet") as rows:
        lost = rows.pop()
    return Expected("rewards", (lost["trajectory_id"], "row: stored none, recomputed present"))


def changed_alignment_row(store: Path) -> Expected:
    with rows_of(folder(store) / "alignment.parquet") as rows:
        row = next(row for row in rows if row["agent"] == "searcher" and row["trajectory_id"])
        row["weight"] = 2.0
    where = f"slot {row['slot']} of rollout {row['rollout_index']} of query {row['query_id']}, column weight"
    return Expected("alignment", ("searcher", row["trajectory_id"], where, "stored 2.0, recomputed 1.0"))


def changed_advantage(store: Path) -> Expected:
    with rows_of(folder(store) / "advantages.parquet") as rows:
        row = next(row for row in rows if row["included"])
        row["advantage"] = -row["advantage"]
    return Expected("advantages", (row["trajectory_id"], "column advantage", repr(row["advantage"])))


def changed_seed(store: Path) -> Expected:
    """The iteration's manifest names the same config with another seed."""
    with json_of(folder(store) / "manifest.json") as manifest:
        configs = store / "r" / "configs"
        raw = json.loads((configs / f"{manifest['config_sha256']}.json").read_text())
        config = RunConfig.model_validate({**raw, "seed": raw["seed"] + 1})
        (configs / f"{config.sha256()}.json").write_text(config.canonical_json())
        manifest |= {"config_sha256": config.sha256(), "lineage_sha256": config.lineage_sha256()}
    return Expected("alignment", ("searcher", "trajectory ", "column trajectory_id", "slot "))


def edited_config(store: Path) -> Expected:
    (config,) = (store / "r" / "configs").iterdir()
    config.write_text(config.read_text().replace('"clip_high":0.28', '"clip_high":0.29'))
    return Expected("manifest", (config.name, "content differs from its name"))


def missing_shard(store: Path) -> Expected:
    shard = folder(store) / "trajectories/searcher-0000.parquet"
    shard.unlink()
    return Expected("rewards", ("trajectories/searcher-0000.parquet", "missing"))


def manifest_of_another_run(store: Path) -> Expected:
    with json_of(folder(store) / "manifest.json") as manifest:
        manifest["run"] = "q"
    return Expected("manifest", ("is the manifest of iteration 1 of run 'q'",))


def reordered_chain(store: Path) -> Expected:
    """Iterations 1 and 2 change places, and each manifest says that it is where it belongs."""
    first, second = folder(store), iteration_folder(store, 2)
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    for place, number in ((first, 1), (second, 2)):
        with json_of(place / "manifest.json") as manifest:
            manifest["iteration"] = number
    return Expected("manifest", ("parent, the manifest before it",))


def changed_weight(store: Path) -> Expected:
    _, path = _edited_weights(store)
    return Expected("update main", (f"{path.parent.name}/{path.name}", "changed after it was written"))


def changed_weight_and_its_hashes(store: Path) -> Expected:
    """Weights, the version's record and the manifest agree with each other, and not with the update."""
    name, path = _edited_weights(store)
    with json_of(path.parent / "version.json") as record:
        record["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sha256 = hashlib.sha256((path.parent / "version.json").read_bytes()).hexdigest()
    with json_of(folder(store) / "manifest.json") as manifest:
        manifest["policies"]["main"]["sha256"] = sha256
    return Expected("update main", (f"model.safetensors, tensor {name}, number 7", "1 of"))


def _edited_weights(store: Path) -> tuple[str, Path]:
    with json_of(folder(store) / "manifest.json") as manifest:
        step = manifest["policies"]["main"]
    assert step["to_version"] > step["from_version"], "the damaged iteration trained the policy"
    path = store / f"r/policies/main/{step['to_version']:08d}/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name].reshape(-1)[7] += 0.5
    save_file(tensors, path, {"format": "pt"})
    return name, path


KINDS: tuple[Callable[[Path], Expected], ...] = (
    flipped_bit_in_a_logprob,
    changed_token,
    another_reward,
    swapped_row,
    lost_row,
    changed_alignment_row,
    changed_advantage,
    changed_seed,
    edited_config,
    missing_shard,
    manifest_of_another_run,
    reordered_chain,
    changed_weight,
    changed_weight_and_its_hashes,
)
"""Those that a replay of the damaged iteration names. Another code version is a note: see the tests."""
