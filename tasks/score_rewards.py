"""Stage: format, correctness and the expert's opinion become one reward a trajectory, every part kept."""

from infra.credit.grades import grade
from infra.credit.rewards import rewards_table
from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.schemas import REWARDS, TRAJECTORIES
from infra.store.tables import read_table, write_table
from infra.store.trajectory_rows import OUTCOME_COLUMNS, trajectories_of
from mgrpo_core.trajectories import Trajectory
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables


@stage
async def score_rewards(resources: RunResources, at: IterationRef, tables: TrajectoryTables) -> FileRef:
    """Score every trajectory once, without reading a token; write the rewards table."""
    config = resources.config
    outcomes = {agent: _outcomes(resources, tables, agent) for agent in config.agents}
    queries = resources.queries_at(at.query_indices)
    grades = await grade(config, resources.verifier, resources.judges, queries, outcomes)
    positions = {query.query_id: position for position, query in enumerate(queries)}
    path = layout.table_file(at.run, at.iteration, "rewards")
    return write_table(resources.files, path, REWARDS, rewards_table(config, positions, outcomes, grades))


def _outcomes(resources: RunResources, tables: TrajectoryTables, agent: str) -> list[Trajectory]:
    return trajectories_of(read_table(resources.files, tables.paths(agent), TRAJECTORIES, OUTCOME_COLUMNS))
