"""Stage: staged groups become one sorted, validated Parquet table an agent."""

import asyncio
from collections import Counter

import numpy as np

from infra.resources import RunResources
from infra.store.rewritten_prompts import REWRITING_COLUMNS, next_prompts_of
from infra.store.schemas import TRAJECTORIES
from infra.store.staging import materialize
from infra.store.tables import read_table
from mgrpo_core.errors import HistoryRewrittenError, IncompleteIterationError
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
        HistoryRewrittenError: a chat template rewrites more than the config accepts.
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
        _require_kept_history(resources, at, tables, agent)
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


def _require_kept_history(resources: RunResources, at: IterationRef, tables: TrajectoryTables, agent: str) -> None:
    """Refuse an iteration in which an agent's prompts mostly do not extend what its policy sampled.

    What is trained would still be what was sampled, in the context that it was sampled in. But each rewritten prompt is
    a segment of its own, computed whole once more, and no server's prefix cache holds it: nobody should pay that
    unawares.
    """
    bound = resources.config.rollout.max_rewritten_share
    columns = [*REWRITING_COLUMNS, "query_id", "rollout_index", "agent_path"]
    rows = read_table(resources.files, tables.paths(agent), TRAJECTORIES, columns)
    prompts = next_prompts_of(rows)
    if prompts.share is None or prompts.first is None or prompts.share <= bound:
        return
    row, turn = prompts.first
    seen = rows.select(columns[len(REWRITING_COLUMNS) :]).slice(row, 1).to_pylist()[0]
    policy = resources.config.agents[agent].policy
    raise HistoryRewrittenError(
        f"{at.label}: {prompts.rewritten} of {prompts.count} later prompts of {agent!r} ({prompts.share:.0%}) do not "
        f"extend, id for id, what policy {policy!r} had seen and sampled; at most {bound:.0%} may be so "
        f"(rollout.max_rewritten_share). No update was made. The chat template of policies.{policy}.init "
        f"({resources.config.policies[policy].init}) rewrites earlier turns, first at turn {turn + 1} of "
        f"{seen['agent_path']}, query {seen['query_id']!r}, rollout {seen['rollout_index']}. Either give the policy's "
        "tokenizer a template that keeps what was said, reasoning included, and start a new run; or accept it, with "
        "rollout.max_rewritten_share: 1, and start again: the rollouts are kept, and each rewritten prompt is trained "
        "as a segment of its own, at the cost of computing it once more."
    )
