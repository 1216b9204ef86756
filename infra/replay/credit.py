"""Rewards, alignment and advantages again, each from the stored tables before it: a fault stays in its own stage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from infra.credit.advantages import REWARD_COLUMNS, SLOT_COLUMNS, advantages_table
from infra.credit.alignment import ALIGNED_COLUMNS, alignment_table
from infra.credit.rewards import rewards_table
from infra.replay.compare import compare_tables
from infra.replay.graders import Graders, graders_of, kept_grades, regrade
from infra.replay.outcomes import outcomes_by_queries
from infra.replay.verdicts import StageVerdict, merged
from infra.store.schemas import REWARDS
from infra.store.stored_iteration import StoredIteration
from mgrpo_core.config import RunConfig


async def replay_rewards(stored: StoredIteration) -> StageVerdict:
    """Score the stored trajectories again, a few queries at a time."""
    graders = graders_of(stored.config, stored.config)
    rewards = stored.table("rewards")
    parts: list[StageVerdict] = []
    row = 0
    with _records_without_cycles():
        async for part in _rescored(stored, stored.config, graders, rewards):
            parts.append(compare_tables("rewards", rewards.slice(row, part.num_rows), part, kept=graders.kept))
            row += part.num_rows
    nothing = pa.Table.from_batches([], REWARDS.columns)
    parts.append(compare_tables("rewards", rewards.slice(row), nothing, kept=graders.kept))
    return merged(parts)


async def rescored(stored: StoredIteration, config: RunConfig) -> pa.Table:
    """The rewards table as another config would have it. A grader by import path is asked only where it is new."""
    graders = graders_of(config, stored.config)
    with _records_without_cycles():
        parts = [part async for part in _rescored(stored, config, graders, stored.table("rewards"))]
    return pa.concat_tables([pa.Table.from_batches([], REWARDS.arrow), *parts])


def replay_alignment(stored: StoredIteration) -> StageVerdict:
    """Align the stored rewards again."""
    rewards = stored.table("rewards", ALIGNED_COLUMNS)
    query_ids = stored.table("queries", ["query_id"]).column(0).to_pylist()
    recomputed = alignment_table(stored.config, stored.manifest.iteration, query_ids, rewards)
    return compare_tables("alignment", stored.table("alignment"), recomputed)


def replay_advantages(stored: StoredIteration) -> StageVerdict:
    """Compare the stored rewards within their groups again, with the stored alignment's weights."""
    rewards, slots = stored.table("rewards", REWARD_COLUMNS), stored.table("alignment", SLOT_COLUMNS)
    recomputed = advantages_table(stored.config, rewards, slots)
    return compare_tables("advantages", stored.table("advantages"), recomputed)


async def _rescored(stored: StoredIteration, config: RunConfig, graders: Graders, rewards: pa.Table):
    queries = stored.queries()
    positions = {query.query_id: position for position, query in enumerate(queries)}
    kept = kept_grades(graders, rewards)
    groups = outcomes_by_queries(
        stored.files,
        {agent: [ref.path for ref in refs] for agent, refs in stored.all_shards().items()},
        len(queries),
        with_messages={agent: agent in graders.judges for agent in config.agents},
    )
    for outcomes in groups:
        grades = await regrade(config, graders, kept, queries, outcomes)
        yield rewards_table(config, positions, outcomes, grades)


@contextmanager
def _records_without_cycles() -> Iterator[None]:
    """No cyclic collector for this block: it would look through a million records, which are freed without it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
