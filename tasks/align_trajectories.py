"""Stage: every rollout gets d slots a sub-agent. Indices and weights; tokens stay where they are."""

from typing import Any

import numpy as np

from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.schemas import ALIGNMENT, REWARDS
from infra.store.tables import read_table, table_of, write_table
from mgrpo_core.credit.alignment import align, rollout_keys
from tasks.iteration_ref import IterationRef
from tasks.stage import stage

_COLUMNS = ("trajectory_id", "agent", "query_id", "rollout_index", "status")


@stage
async def align_trajectories(resources: RunResources, at: IterationRef, rewards: FileRef) -> FileRef:
    """Align the scored trajectories of each agent; write the alignment table.

    A trajectory without a reward is no member: it fills no slot, as if the invocation had not been (algorithm.md §6,
    rows 1 and 11). The main agent has one slot a rollout.
    """
    config = resources.config
    table = read_table(resources.files, rewards.path, REWARDS, _COLUMNS).to_pydict()
    arrays = {name: np.array(values, dtype=object) for name, values in table.items()}
    query_ids = [query.query_id for query in resources.queries_at(at.query_indices)]
    k = config.rollout.rollouts_per_query
    place = {query_id: position * k for position, query_id in enumerate(query_ids)}
    queries_R = [query_id for query_id in query_ids for _ in range(k)]
    indices_R = list(range(k)) * len(query_ids)

    columns: dict[str, list[Any]] = {name: [] for name in ALIGNMENT.columns.names}
    for name, agent in config.agents.items():
        members = np.flatnonzero((arrays["agent"] == name) & (arrays["status"] == "scored"))
        rollout_N = np.array(
            [place[arrays["query_id"][row]] + arrays["rollout_index"][row] for row in members], dtype=np.int64
        )
        keys = rollout_keys(config.seed, at.iteration, name, queries_R, indices_R)
        is_main = name == config.main_agent
        aligned = align(rollout_N, keys, 1 if is_main else agent.d, "none" if is_main else config.alignment.mode)
        ids = arrays["trajectory_id"][members]
        columns["agent"] += [name] * len(aligned.rollout_M)
        columns["query_id"] += [queries_R[rollout] for rollout in aligned.rollout_M]
        columns["rollout_index"] += [indices_R[rollout] for rollout in aligned.rollout_M]
        columns["slot"] += aligned.slot_M.tolist()
        columns["trajectory_id"] += [ids[member] if member >= 0 else None for member in aligned.member_M]
        columns["copy_index"] += aligned.copy_M.tolist()
        columns["weight"] += aligned.weight_M.tolist()
    path = layout.table_file(at.run, at.iteration, "alignment")
    return write_table(resources.files, path, ALIGNMENT, table_of(ALIGNMENT, columns))
