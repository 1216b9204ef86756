"""An iteration of many trajectories, as its stages would have left it. Tokens are few unless asked for."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from infra.credit.advantages import advantages_table
from infra.credit.alignment import alignment_table
from infra.credit.grades import grade
from infra.credit.rewards import rewards_table
from infra.datasets.geo_facts import facts
from infra.replay.graders import graders_of
from infra.store import layout
from infra.store.code_version import code_version
from infra.store.files import FileRef, StoreFiles
from infra.store.manifests import Manifest, commit_manifest
from infra.store.runs import StoredRun, create_or_open_run
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TableSchema
from infra.store.staging import _Shards
from infra.store.tables import table_of, write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.config import RunConfig
from mgrpo_core.data_order import DataCursor
from mgrpo_core.seeds import rng_of
from mgrpo_core.trajectories import (
    Message,
    PathStep,
    Query,
    Status,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from tests.infra.store.small_run import config

RUN, TURNS, TOKENS = "large", 2, 16
_STREAMS = 64  # that differ: more than a page compresses at a time
_FACTS = facts()
_Stream = tuple[np.ndarray, np.ndarray, np.ndarray]
_SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "which one is it"}}</tool_call>'


def write_large_iteration(
    files: StoreFiles, queries: int, *, rollouts: int = 8, calls: int = 8, tokens: int = TOKENS
) -> StoredRun:
    """Iteration 0 of queries x rollouts x (1 + calls) trajectories. The quickstart's judge reads every report."""
    streams = [_stream(number, tokens) for number in range(_STREAMS if tokens > TOKENS else 1)]
    settings = config(
        agents={
            "main": {"policy": "main", "prompt": "Answer.", "delegates": ["searcher"]},
            "searcher": {
                "policy": "sub",
                "prompt": "Search.",
                "description": "Searches.",
                "judge": "facts:geo_facts",
                "d": 8,
            },
        },
        rollout={"queries_per_iteration": queries, "rollouts_per_query": rollouts},
    )
    run = create_or_open_run(files, RUN, settings)
    asked = [Query(f"q{number}", "Which river flows there?", ("answer 1",)) for number in range(queries)]
    refs = [_write(files, "queries", QUERIES, _queries_columns(asked))]
    agents = tuple(settings.agents)
    rewards: list[dict[str, list[object]]] = []
    graders = graders_of(settings, settings)
    positions = {query.query_id: position for position, query in enumerate(asked)}
    with ExitStack() as stack:
        writers = {agent: stack.enter_context(_Shards(files, (RUN, 0, agent))) for agent in agents}
        for position, query in enumerate(asked):
            outcomes: dict[str, list[Trajectory]] = {agent: [] for agent in agents}
            for one in _trajectories(query.query_id, rollouts, calls, streams):
                outcomes[one.key.agent].append(one)
            for agent, writer in writers.items():
                writer.write(trajectories_table([(position, one) for one in outcomes[agent]]))
            grades = asyncio.run(grade(settings, graders.verifier, graders.judges, asked, outcomes))
            rewards.append(rewards_table(settings, positions, outcomes, grades).to_pydict())
    columns = {name: [value for part in rewards for value in part[name]] for name in REWARDS.columns.names}
    scored = table_of(REWARDS, columns)
    slots = alignment_table(settings, 0, list(positions), scored)
    refs += [ref for writer in writers.values() for ref in writer.refs]
    refs.append(_write(files, "rewards", REWARDS, columns))
    refs.append(_write(files, "alignment", ALIGNMENT, slots.to_pydict()))
    refs.append(_write(files, "advantages", ADVANTAGES, advantages_table(settings, scored, slots).to_pydict()))
    _commit(files, settings, refs)
    return run


def _stream(number: int, tokens: int) -> _Stream:
    """Token ids of a large vocabulary, and log-probs where they were sampled: in the second half of each turn."""
    rng = rng_of("large iteration", number)
    mask_T = np.arange(tokens) % (tokens // TURNS) >= tokens // TURNS // 2
    ids_T = rng.integers(0, 150_000, tokens, dtype=np.int32)
    return ids_T, mask_T, np.where(mask_T, -rng.exponential(size=tokens), np.nan).astype(np.float32)


def _trajectories(query_id: str, rollouts: int, calls: int, streams: Sequence[_Stream]) -> Iterator[Trajectory]:
    for rollout in range(rollouts):
        head = TrajectoryKey(RUN, 0, query_id, rollout, (PathStep("main", 0),))
        for call, key in enumerate([head, *(head.child("searcher", call) for call in range(calls))]):
            fact = _FACTS[(rollout + call) % len(_FACTS)]
            reply = f"answer {rollout % 3}" if call == 0 else fact.accepted[0]
            yield _trajectory(key, fact.key, reply, streams[(rollout * (1 + calls) + call) % len(streams)])


def _trajectory(key: TrajectoryKey, task: str, reply: str, stream: _Stream) -> Trajectory:
    """A search or a delegation, its result, and an answer."""
    ids_T, mask_T, logprobs_T = stream
    span = len(ids_T) // TURNS
    found = "\n".join(f"- {fact.key}: {fact.accepted[0]}" for fact in _FACTS[:5])
    return Trajectory(
        key=key,
        policy="main" if key.depth == 0 else "sub",
        token_ids=ids_T,
        loss_mask=mask_T,
        logprobs=logprobs_T,
        segment_starts=(0,),
        turns=tuple(
            Turn(start + span // 2, start + span, "stop", 0, start, "tool" if start == 0 else "answer")
            for start in range(0, TURNS * span, span)
        ),
        messages=(
            Message("user", task),
            Message("assistant", _SEARCH),
            Message("tool", found),
            Message("assistant", f"<answer>{reply}</answer>"),
        ),
        task=task,
        reply=reply,
        temperature=1.0,
        status=Status.OK,
        stop_reason=StopReason.ANSWER,
    )


def _queries_columns(asked: list[Query]) -> dict[str, object]:
    return {
        "position": range(len(asked)),
        "query_id": [query.query_id for query in asked],
        "question": [query.question for query in asked],
        "answers": [list(query.answers) for query in asked],
        "metadata_json": [query.metadata_json for query in asked],
        "epoch": [0] * len(asked),
    }


def _write(files: StoreFiles, name: str, schema: TableSchema, columns: dict[str, object]) -> FileRef:
    return write_table(files, layout.table_file(RUN, 0, name), schema, table_of(schema, columns))


def _commit(files: StoreFiles, settings: RunConfig, refs: list[FileRef]) -> None:
    prefix = f"{layout.iteration_folder(RUN, 0)}/"
    commit_manifest(
        files,
        Manifest(
            run=RUN,
            iteration=0,
            config_sha256=settings.sha256(),
            lineage_sha256=settings.lineage_sha256(),
            code_version=code_version(),
            parent_sha256=None,
            files={ref.path.removeprefix(prefix): ref for ref in refs},
            policies={},
            cursor=DataCursor(0, len(refs)),
            created_at="2026-12-01T00:00:00+00:00",
            writer="a benchmark",
        ),
    )
