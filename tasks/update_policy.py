"""Stage: one policy's update in this process, from its own rows and the small tables alone."""

from infra.resources import RunResources
from infra.store.files import FileRef
from infra.training.policy_update import PolicyUpdate, carry_out, update_order
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.stoppable import stoppable
from tasks.tables import TrajectoryTables


@stage(task_run_name="update_policy-{policy}")
async def update_policy(
    resources: RunResources, at: IterationRef, policy: str, tables: TrajectoryTables, advantages: FileRef
) -> PolicyUpdate:
    """Make version n+1 of a policy, or find it made from the same inputs; write the update's figures."""
    files, config = resources.files, resources.config
    order = update_order(files, config, (at.run, at.iteration), policy, at.versions[policy], tables.shards, advantages)
    with resources.progress.bar(f"update · {policy}", 1, "tokens") as bar:
        return await stoppable(lambda move: carry_out(files, config, order, resources.cache, move), bar.move)
