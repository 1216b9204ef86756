"""Stage: one policy's update as a run of its own, on the policy's work pool."""

import asyncio
from dataclasses import asdict

from infra.deploy.settings import UPDATE_FLOW
from infra.resources import RunResources
from infra.store.files import FileRef
from infra.training.policy_update import PolicyUpdate, find_update, update_order
from mgrpo_core.errors import TableIntegrityError
from tasks.child_runs import ChildRun, Patience, completed_run
from tasks.iteration_ref import IterationRef
from tasks.logs import stage_logger
from tasks.stage import stage
from tasks.tables import TrajectoryTables


@stage(task_run_name="dispatch_update-{policy}")
async def dispatch_update(
    resources: RunResources, at: IterationRef, policy: str, tables: TrajectoryTables, advantages: FileRef
) -> PolicyUpdate:
    """Have `mgrpo-policy-update/<policy>` make version n+1, and read what it did from the store.

    An update that the store has is not run again; one that is under way, started by an iteration that died, is
    awaited. The store says what was done: the run's own result is never read.

    Raises:
        UpdateFailedError: it failed, was cancelled or took too long; with its error and its link.
        TableIntegrityError: its run is Completed, but the store has no such update.
    """
    files, config = resources.files, resources.config
    order = update_order(files, config, (at.run, at.iteration), policy, at.versions[policy], tables.shards, advantages)
    done = await asyncio.to_thread(find_update, files, config, order)
    if done is not None:
        stage_logger().info("The update of policy %s is in the store already.", policy)
        return done
    execution = config.execution
    child = ChildRun(
        deployment=f"{UPDATE_FLOW}/{policy}",
        pool=config.update_pool_of(policy),
        name=f"{at.label}-{policy}",
        key=f"{files.url}/{at.run}/{at.iteration}/{policy}/{order.inputs_sha256}",
        parameters={"order": asdict(order), "store": files.url},
    )
    patience = Patience(
        attempts=execution.update_attempts,
        start_s=execution.start_deadline_s,
        run_s=execution.update_deadline_s,
        server_s=execution.server_patience_s,
    )
    run = await completed_run(child, patience, lambda: find_update(files, config, order) is not None)
    done = await asyncio.to_thread(find_update, files, config, order)
    if done is None:
        raise TableIntegrityError(
            f"{files.uri(at.run)}: run {run} of {child.deployment} is Completed, but the store has no such update of "
            f"policy {policy!r}. Does its worker reach another store under the same address? Compare its log."
        )
    return done
