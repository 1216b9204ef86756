"""Stage: staged groups become one sorted, validated Parquet table an agent."""

import asyncio
from collections import Counter

import numpy as np

from infra.resources import RunResources
from infra.store.schemas import TRAJECTORIES
from infra.store.staging import materialize
from infra.store.tables import read_table
from mgrpo_core.errors import IncompleteIterationError
from mgrpo_core.trajectories import Status
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables


@stage
async def materialize_trajectories(resources: RunResources, at: IterationRef) -> TrajectoryTables:
    """Merge the staged groups, and refuse an iteration of which too much is missing.

    Raises:
        IncompleteIterationError: rollouts are unaccounted for, too many ended by a failure of ours, or too many calls
            were refused.
    """
    shards = await asyncio.to_thread(
        materialize,
        resources.files,
        at.run,
        at.iteration,
        range(len(at.query_indices)),
        tuple(resources.config.agents),
    )
    tables = TrajectoryTables({agent: tuple(refs) for agent, refs in shards.items()})
    _require_enough(resources, at, tables)
    for agent in resources.config.agents:
        _require_working_calls(resources, at, tables, agent)
    return tables


def _require_enough(resources: RunResources, at: IterationRef, tables: TrajectoryTables) -> None:
    config = resources.config
    main = config.main_agent
    rows = read_table(resources.files, tables.paths(main), TRAJECTORIES, ["status", "failure", "query_id"]).to_pylist()
    expected = len(at.query_indices) * config.rollout.rollouts_per_query
    if len(rows) != expected:
        raise IncompleteIterationError(
            f"{at.label}: {len(rows)} rollouts of {expected} are in the table of {main!r}. Remove the iteration's "
            "staging folder and start it again."
        )
    lost = [row for row in rows if row["status"] == Status.INFRA_FAILED]
    share = 1 - len(lost) / expected
    if share < config.rollout.min_scored_share:
        reasons = sorted({str(row["failure"]).rstrip(".") for row in lost})
        raise IncompleteIterationError(
            f"{at.label}: {len(lost)} of {expected} rollouts ended by an infrastructure failure; at least "
            f"{config.rollout.min_scored_share:.0%} must not (rollout.min_scored_share). No update was made. "
            f"Reasons: {'; '.join(reasons[:3])}. Mend the cause, remove the iteration's staging folder, start again."
        )


def _require_working_calls(resources: RunResources, at: IterationRef, tables: TrajectoryTables, agent: str) -> None:
    """Refuse an iteration in which nearly every call went wrong: a tool or a prompt is broken, not a policy."""
    bound = resources.config.rollout.max_tool_error_share
    turns = read_table(resources.files, tables.paths(agent), TRAJECTORIES, ["turns"]).column("turns").combine_chunks()
    flat = turns.flatten()
    called = np.array(flat.field("action_name").is_valid()) & (np.array(flat.field("finish_reason")) == "stop")
    errors = np.array(flat.field("error").to_pylist(), dtype=object)[called]
    refused = errors[errors != None]  # noqa: E711 - elementwise
    if len(refused) > bound * len(errors):
        reasons = [f"{reason!r} ({count})" for reason, count in Counter(refused.tolist()).most_common(3)]
        raise IncompleteIterationError(
            f"{at.label}: {len(refused)} of {len(errors)} calls of {agent!r} were refused; at most {bound:.0%} may be "
            f"(rollout.max_tool_error_share). No update was made. Most frequent: {', '.join(reasons)}."
        )
