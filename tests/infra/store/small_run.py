"""Small runs, written as the stages write them: two agents, two policies, a few queries."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from infra.store import layout
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import CommittedManifest, Manifest, PolicyStep, commit_manifest
from infra.store.policies import PolicyVersion, find_version, publish_version
from infra.store.runs import StoredRun, create_or_open_run
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS
from infra.store.staging import clear_staging, materialize, stage_group
from infra.store.tables import table_of, write_table
from mgrpo_core.config import RunConfig
from mgrpo_core.data_order import DataCursor
from mgrpo_core.seeds import rng_of
from mgrpo_core.trajectories import (
    Message,
    PathStep,
    Rollout,
    Status,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)

AGENTS = ("main", "searcher")
POLICY_OF = {"main": "main", "searcher": "sub"}
QUERIES_OF_AN_ITERATION = ("q0", "q1")


def config(**changes: object) -> RunConfig:
    """A sound config of the team above."""
    raw = {
        "agents": {
            "main": {"policy": "main", "prompt": "Answer.", "delegates": ["searcher"], "verifier": "exact_match"},
            "searcher": {
                "policy": "sub",
                "prompt": "Search.",
                "description": "Searches.",
                "reward": {"format": 0.2, "main_correct": 0.8, "expert": 0.0},
                "d": 2,
            },
        },
        "policies": {"main": {"init": "a"}, "sub": {"init": "b"}},
        "data": {"train": "questions.jsonl"},
        "rollout": {"queries_per_iteration": 2, "rollouts_per_query": 2},
    }
    return RunConfig.model_validate({**raw, **changes})


def trajectory(key: TrajectoryKey, *, tokens: int = 8, reply: str | None = "42") -> Trajectory:
    """A trajectory of one turn: three prompt tokens, the rest sampled. A function of its key."""
    rng = rng_of("trajectory", key.trajectory_id)
    mask_T = np.arange(tokens) >= min(3, tokens)
    return Trajectory(
        key=key,
        policy=POLICY_OF[key.agent],
        token_ids=rng.integers(0, 1000, tokens, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, -rng.random(tokens), np.nan).astype(np.float32),
        segment_starts=(0,),
        turns=(
            Turn(
                start=min(3, tokens),
                stop=tokens,
                finish_reason="stop",
                policy_version=key.iteration,
                seed=2**53 + 1 + int(rng.integers(1000)),
                action="answer",
            ),
        ),
        messages=(Message("user", "What is it?"), Message("assistant", "42")),
        task="What is it?",
        reply=reply,
        temperature=1.0,
        status=Status.OK,
        stop_reason=StopReason.ANSWER,
    )


def rollouts(
    run: str, iteration: int, query_id: str, calls: Sequence[int] = (1, 2), tokens: int = 8
) -> tuple[Rollout, ...]:
    """One rollout for each entry of `calls`, with so many invocations of the searcher."""
    made = []
    for index, count in enumerate(calls):
        main = TrajectoryKey(run, iteration, query_id, index, (PathStep("main", 0),))
        keys = [main, *(main.child("searcher", call) for call in range(count))]
        made.append(Rollout(query_id, index, tuple(trajectory(key, tokens=tokens) for key in keys)))
    return tuple(made)


def start_run(files: StoreFiles, run: str, scratch: Path, **changes: object) -> StoredRun:
    """A new run with version 0 of both policies."""
    opened = create_or_open_run(files, run, config(**changes))
    for policy in ("main", "sub"):
        make_version(files, run, policy, 0, scratch, inputs="initial weights")
    return opened


def make_version(
    files: StoreFiles, run: str, policy: str, version: int, scratch: Path, *, inputs: str
) -> PolicyVersion:
    """Publish a version of a few small files, one of them in a folder; its bytes are a function of the inputs."""
    folder = scratch / f"{policy}-{version}-{inputs}"
    (folder / "extra").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(rng_of(policy, version, inputs).bytes(2000))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "extra" / "template.jinja").write_text("{{ messages }}", encoding="utf-8")
    before = find_version(files, run, policy, policy, version - 1) if version else None
    return publish_version(
        files,
        run,
        policy,
        policy,
        version,
        folder,
        parent_sha256=before.sha256 if before else None,
        inputs_sha256=inputs,
    )


def write_tables(files: StoreFiles, run: str, iteration: int, calls: Sequence[int] = (1, 2)) -> dict[str, FileRef]:
    """Every table of an iteration. Slot s of a rollout takes its invocation s modulo their number, weight 1 each."""
    groups = {query_id: rollouts(run, iteration, query_id, calls) for query_id in QUERIES_OF_AN_ITERATION}
    count = len(groups)
    refs = [
        write_table(
            files,
            layout.table_file(run, iteration, "queries"),
            QUERIES,
            table_of(
                QUERIES,
                {
                    "position": range(count),
                    "query_id": list(groups),
                    "question": ["What is it?"] * count,
                    "answers": [["42"]] * count,
                    "metadata_json": ["{}"] * count,
                    "epoch": [0] * count,
                },
            ),
        )
    ]
    for position, group in enumerate(groups.values()):
        stage_group(files, run, iteration, position, group)
    for shards in materialize(files, run, iteration, range(count), AGENTS).values():
        refs.extend(shards)

    rows = [(query_id, one) for query_id, group in groups.items() for made in group for one in made.trajectories]
    reward_of = {one.trajectory_id: float(index % 3) / 2 for index, (_, one) in enumerate(rows)}
    rewards = {
        "trajectory_id": [one.trajectory_id for _, one in rows],
        "parent_id": [one.parent_id for _, one in rows],
        "agent": [one.key.agent for _, one in rows],
        "query_position": [QUERIES_OF_AN_ITERATION.index(query_id) for query_id, _ in rows],
        "query_id": [query_id for query_id, _ in rows],
        "rollout_index": [one.key.rollout_index for _, one in rows],
        "agent_path": [one.key.agent_path for _, one in rows],
        "call_index": [one.key.call_index for _, one in rows],
        "status": ["scored"] * len(rows),
        "reason": [None] * len(rows),
        "reward": [reward_of[one.trajectory_id] for _, one in rows],
        "format": [1.0] * len(rows),
        "correct": [None] * len(rows),
        "main_correct": [None] * len(rows),
        "expert": [None] * len(rows),
        "format_weight": [0.1] * len(rows),
        "correct_weight": [None] * len(rows),
        "main_correct_weight": [None] * len(rows),
        "expert_weight": [None] * len(rows),
        "verifier": ["exact_match"] * len(rows),
        "judge_version": [None] * len(rows),
    }
    refs.append(write_table(files, layout.table_file(run, iteration, "rewards"), REWARDS, table_of(REWARDS, rewards)))

    slots = []
    for query_id, group in groups.items():
        for made in group:
            subs = made.trajectories[1:]
            slots.append(("main", query_id, made.rollout_index, 0, made.trajectories[0].trajectory_id, 0, 1.0))
            for slot in range(2):
                chosen = subs[slot % len(subs)].trajectory_id if subs else None
                copy = slot // len(subs) if subs else 0
                slots.append(("searcher", query_id, made.rollout_index, slot, chosen, copy, 1.0 if subs else 0.0))
    alignment = dict(zip(ALIGNMENT.columns.names, map(list, zip(*slots, strict=True)), strict=True))
    path = layout.table_file(run, iteration, "alignment")
    refs.append(write_table(files, path, ALIGNMENT, table_of(ALIGNMENT, alignment)))

    weight_of = {one.trajectory_id: 0.0 for _, one in rows}
    for _, _, _, _, chosen, _, weight in slots:
        if chosen is not None:
            weight_of[chosen] += weight
    advantages = {
        "trajectory_id": [one.trajectory_id for _, one in rows],
        "agent": [one.key.agent for _, one in rows],
        "policy": [one.policy for _, one in rows],
        "query_id": [query_id for query_id, _ in rows],
        "reward": [reward_of[one.trajectory_id] for _, one in rows],
        "weight": [weight_of[one.trajectory_id] for _, one in rows],
        "advantage": [2 * reward_of[one.trajectory_id] - 1 for _, one in rows],
        "group_mean": [0.5] * len(rows),
        "group_std": [0.5] * len(rows),
        "group_size": [len(rows)] * len(rows),
        "included": [weight_of[one.trajectory_id] > 0 for _, one in rows],
        "excluded_reason": [None if weight_of[one.trajectory_id] > 0 else "dropped by alignment" for _, one in rows],
    }
    path = layout.table_file(run, iteration, "advantages")
    refs.append(write_table(files, path, ADVANTAGES, table_of(ADVANTAGES, advantages)))
    prefix = layout.iteration_folder(run, iteration) + "/"
    return {ref.path.removeprefix(prefix): ref for ref in refs}


def write_iteration(
    files: StoreFiles,
    run: str,
    iteration: int,
    scratch: Path,
    parent: CommittedManifest | None = None,
    calls: Sequence[int] = (1, 2),
) -> CommittedManifest:
    """A whole iteration: tables, a new version of each policy, the updates' figures, the manifest."""
    tables = write_tables(files, run, iteration, calls)
    steps = {}
    for policy in ("main", "sub"):
        made = make_version(files, run, policy, iteration + 1, scratch, inputs=f"iteration {iteration}")
        steps[policy] = PolicyStep(policy, iteration, iteration + 1, made.sha256)
        record = {"policy": policy, **asdict(steps[policy])}
        ref = files.write(layout.update_file(run, iteration, policy), json.dumps(record).encode())
        tables[f"updates/{policy}.json"] = ref
    committed = commit_manifest(files, manifest(run, iteration, tables, steps, parent))
    clear_staging(files, run, iteration)
    return committed


def manifest(
    run: str,
    iteration: int,
    tables: dict[str, FileRef],
    steps: dict[str, PolicyStep],
    parent: CommittedManifest | None = None,
    writer: str = "a test",
) -> Manifest:
    """The manifest over these files and steps."""
    import hashlib

    text = config().canonical_json()
    return Manifest(
        run=run,
        iteration=iteration,
        config_sha256=hashlib.sha256(text.encode()).hexdigest(),
        lineage_sha256=config().lineage_sha256(),
        code_version="0+test",
        parent_sha256=parent.sha256 if parent else None,
        files=tables,
        policies=steps,
        cursor=DataCursor(0, 2 * (iteration + 1)),
        created_at="2026-12-01T00:00:00+00:00",
        writer=writer,
    )


def write_run(files: StoreFiles, run: str, scratch: Path, iterations: int) -> StoredRun:
    """A run of so many iterations."""
    opened = start_run(files, run, scratch)
    parent = None
    for iteration in range(iterations):
        parent = write_iteration(files, run, iteration, scratch, parent)
    return opened
