"""Stage: each aligned trajectory against its own group, per agent and query."""

from infra.credit.advantages import REWARD_COLUMNS, SLOT_COLUMNS, advantages_table
from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.schemas import ADVANTAGES, ALIGNMENT, REWARDS
from infra.store.tables import read_table, write_table
from tasks.iteration_ref import IterationRef
from tasks.stage import stage


@stage
async def compute_advantages(
    resources: RunResources, at: IterationRef, rewards: FileRef, alignment: FileRef
) -> FileRef:
    """Compare within groups, agent by agent; write one row a trajectory, those left out with the reason why."""
    scored = read_table(resources.files, rewards.path, REWARDS, REWARD_COLUMNS)
    slots = read_table(resources.files, alignment.path, ALIGNMENT, SLOT_COLUMNS)
    path = layout.table_file(at.run, at.iteration, "advantages")
    return write_table(resources.files, path, ADVANTAGES, advantages_table(resources.config, scored, slots))
