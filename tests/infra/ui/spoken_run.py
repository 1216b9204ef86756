"""A run in which somebody speaks: real token ids, several rewards, and text that would like to be more than text."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import infra.quickstart
from infra.credit.advantages import advantages_table
from infra.credit.alignment import alignment_table
from infra.credit.grades import grade
from infra.credit.rewards import rewards_table
from infra.replay.graders import graders_of
from infra.store import layout
from infra.store.code_version import code_version
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import CommittedManifest, Manifest, PolicyStep, commit_manifest
from infra.store.policies import publish_version
from infra.store.runs import StoredRun, create_or_open_run
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import table_of, write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.config import RunConfig
from mgrpo_core.data_order import DataCursor
from mgrpo_core.trajectories import Message, PathStep, Query, Status, StopReason, Trajectory, TrajectoryKey, Turn
from tests.infra.store.small_run import config

RUN, ROLLOUTS = "spoken", 4
SCRIPT = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"
HOSTILE = f"{SCRIPT} \x1b[31mred\x1b[0m \u202eright to left\u202c nul\x00end [click](javascript:window.stolen=3)"
QUERIES_ASKED = (
    Query("q0", "Where does the river end?", ("the sea",)),
    Query("q1", f"What is {SCRIPT}?", ("markup",)),
    Query("q2", "Who says nothing?", ("nobody",)),
)
_POLICIES = Path(infra.quickstart.__file__).parent / "policies"
_TOKENIZERS = {name: Tokenizer.from_file(str(_POLICIES / name / "tokenizer.json")) for name in ("main", "sub")}


def write_spoken_run(files: StoreFiles, scratch: Path, iterations: int) -> StoredRun:
    """Each iteration: three queries, four rollouts each; rollout 1 asks the searcher twice, rollout 2 once.

    Rollout 0 answers at once, rightly, but not to the last query, whose rollout 3 is lost to infrastructure.
    """
    settings = config(rollout={"queries_per_iteration": len(QUERIES_ASKED), "rollouts_per_query": ROLLOUTS})
    run = create_or_open_run(files, RUN, settings)
    for policy in ("main", "sub"):
        _publish(files, policy, 0, scratch)
    parent = None
    for iteration in range(iterations):
        parent = _write_iteration(files, settings, iteration, scratch, parent)
    return run


def _write_iteration(
    files: StoreFiles, settings: RunConfig, iteration: int, scratch: Path, parent: CommittedManifest | None
) -> CommittedManifest:
    outcomes = {agent: [] for agent in settings.agents}
    for query in QUERIES_ASKED:
        for rollout in range(ROLLOUTS):
            for one in _rollout(iteration, query, rollout):
                outcomes[one.key.agent].append(one)
    positions = {query.query_id: place for place, query in enumerate(QUERIES_ASKED)}
    graders = graders_of(settings, settings)
    grades = asyncio.run(grade(settings, graders.verifier, graders.judges, QUERIES_ASKED, outcomes))
    rewards = rewards_table(settings, positions, outcomes, grades)
    slots = alignment_table(settings, iteration, list(positions), rewards)
    credit = advantages_table(settings, rewards, slots)
    refs = [
        write_table(
            files,
            layout.trajectories_file(RUN, iteration, agent, 0),
            TRAJECTORIES,
            trajectories_table([(positions[one.key.query_id], one) for one in own]),
        )
        for agent, own in outcomes.items()
    ]
    for name, schema, columns in (
        ("queries", QUERIES, _queries_columns()),
        ("rewards", REWARDS, rewards.to_pydict()),
        ("alignment", ALIGNMENT, slots.to_pydict()),
        ("advantages", ADVANTAGES, credit.to_pydict()),
    ):
        refs.append(_write(files, iteration, name, schema, columns))
    refs.append(files.write(layout.metrics_file(RUN, iteration), json.dumps(metrics_of(iteration)).encode()))
    steps = {policy: _publish(files, policy, iteration + 1, scratch) for policy in ("main", "sub")}
    prefix = f"{layout.iteration_folder(RUN, iteration)}/"
    return commit_manifest(
        files,
        Manifest(
            run=RUN,
            iteration=iteration,
            config_sha256=settings.sha256(),
            lineage_sha256=settings.lineage_sha256(),
            code_version=code_version(),
            parent_sha256=parent.sha256 if parent else None,
            files={ref.path.removeprefix(prefix): ref for ref in refs},
            policies=steps,
            cursor=DataCursor(0, len(QUERIES_ASKED) * (iteration + 1)),
            created_at="2026-12-01T00:00:00+00:00",
            writer="a test",
        ),
    )


def _rollout(iteration: int, query: Query, rollout: int) -> list[Trajectory]:
    key = TrajectoryKey(RUN, iteration, query.query_id, rollout, (PathStep("main", 0),))
    if query.query_id == "q2" and rollout == 3:
        return [_trajectory(key, query.question, [], None, failure="the search server is down")]
    calls = {1: 2, 2: 1}.get(rollout, 0)
    right = rollout == 0 and query.query_id != "q2"
    reply = query.answers[0] if right else f"wrong {rollout}"
    asked = [("searcher", f"look for {call}", HOSTILE) for call in range(calls)]
    main = _trajectory(key, query.question, asked, reply)
    found = [
        _trajectory(key.child("searcher", call), task, [("search", "river", f"Page {call}: {HOSTILE}")], said)
        for call, (_, task, said) in enumerate(asked)
    ]
    return [main, *found]


def _trajectory(
    key: TrajectoryKey, task: str, calls: list[tuple[str, str, str]], reply: str | None, failure: str | None = None
) -> Trajectory:
    """The task, each call with its result, the reply: messages, and the same as tokens and turns."""
    policy = "main" if key.depth == 0 else "sub"
    messages, turns = [Message("user", task)], list[Turn]()
    ids, mask = list[int](), list[bool]()

    def say(text: str, *, sampled: bool) -> tuple[int, int]:
        start = len(ids)
        ids.extend(_TOKENIZERS[policy].encode(text, add_special_tokens=False).ids)
        mask.extend([sampled] * (len(ids) - start))
        return start, len(ids)

    say(task, sampled=False)
    action = "delegate" if key.depth == 0 else "tool"
    for name, argument, result in calls:
        call = json.dumps({"name": name, "arguments": {"task": argument}})
        messages += [Message("assistant", f"<tool_call>{call}</tool_call>"), Message("tool", result, name)]
        start, stop = say(call, sampled=True)
        got = say(result, sampled=False)
        turns.append(
            Turn(start, stop, "stop", key.iteration, 2**53 + 1, action, name, call, None, got[1] - got[0], len(result))
        )
    if reply is not None:
        messages.append(Message("assistant", f"<answer>{reply}</answer>"))
        start, stop = say(f"<answer>{reply}</answer>", sampled=True)
        turns.append(Turn(start, stop, "stop", key.iteration, 7, "answer"))
    mask_T = np.array(mask)
    return Trajectory(
        key=key,
        policy=policy,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, -0.5 * (np.arange(len(ids)) % 5), np.nan).astype(np.float32),
        segment_starts=(0,),
        turns=tuple(turns),
        messages=tuple(messages),
        task=task,
        reply=reply,
        temperature=1.0,
        status=Status.INFRA_FAILED if failure else Status.OK,
        stop_reason=StopReason.INFRASTRUCTURE if failure else StopReason.ANSWER,
        failure=failure,
    )


def _publish(files: StoreFiles, policy: str, version: int, scratch: Path) -> PolicyStep:
    """A version that has a tokenizer, and no weights to speak of."""
    folder = scratch / f"{policy}-{version}"
    folder.mkdir(parents=True)
    shutil.copy(_POLICIES / policy / "tokenizer.json", folder)
    (folder / "model.safetensors").write_bytes(f"{policy} {version}".encode())
    made = publish_version(
        files, RUN, policy, policy, version, folder, parent_sha256=None, inputs_sha256=f"{policy} {version}"
    )
    return PolicyStep(policy, max(0, version - 1), version, made.sha256)


def metrics_of(iteration: int) -> dict[str, float]:
    metrics: dict[str, float] = {"success": 0.1 * iteration, "seconds/main_rollout": 2.0, "seconds/update_policy": 1.0}
    for agent in ("main", "searcher"):
        metrics |= {f"{agent}/reward": 0.25 + iteration, f"{agent}/zero_variance_groups": 0.5, f"{agent}/format": 1.0}
        metrics |= {f"{agent}/trajectories": 12.0, f"{agent}/sampled_tokens_mean": 9.5}
    metrics |= {"searcher/invocations_mean": 0.75, "searcher/invocations_max": 2.0}
    for policy in ("main", "sub"):
        metrics |= {
            f"update/{policy}/{name}": 0.01 for name in ("approx_kl", "mismatch_mean", "mismatch_max", "grad_norm")
        }
    return metrics


def _queries_columns() -> dict[str, object]:
    return {
        "position": range(len(QUERIES_ASKED)),
        "query_id": [query.query_id for query in QUERIES_ASKED],
        "question": [query.question for query in QUERIES_ASKED],
        "answers": [list(query.answers) for query in QUERIES_ASKED],
        "metadata_json": [query.metadata_json for query in QUERIES_ASKED],
        "epoch": [0] * len(QUERIES_ASKED),
    }


def _write(files: StoreFiles, iteration: int, name: str, schema: TableSchema, columns: dict[str, object]) -> FileRef:
    return write_table(files, layout.table_file(RUN, iteration, name), schema, table_of(schema, columns))
