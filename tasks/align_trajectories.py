"""Stage: every rollout gets d slots a sub-agent. Indices and weights; tokens stay where they are."""

from infra.credit.alignment import ALIGNED_COLUMNS, alignment_table
from infra.resources import RunResources
from infra.store import layout
from infra.store.files import FileRef
from infra.store.schemas import ALIGNMENT, REWARDS
from infra.store.tables import read_table, write_table
from tasks.iteration_ref import IterationRef
from tasks.stage import stage


@stage
async def align_trajectories(resources: RunResources, at: IterationRef, rewards: FileRef) -> FileRef:
    """Align the scored trajectories of each agent; write the alignment table."""
    scored = read_table(resources.files, rewards.path, REWARDS, ALIGNED_COLUMNS)
    query_ids = [query.query_id for query in resources.queries_at(at.query_indices)]
    path = layout.table_file(at.run, at.iteration, "alignment")
    table = alignment_table(resources.config, at.iteration, query_ids, scored)
    return write_table(resources.files, path, ALIGNMENT, table)
