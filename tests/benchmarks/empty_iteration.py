"""An iteration with the stages of a real one and no work in them: what is left is orchestration."""

from typing import Any

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE

from mgrpo_core.side_by_side import side_by_side
from tasks.child_runs import ChildRun, Patience, completed_run

STAGES = (
    "open_iteration",
    "main_rollout",
    "sub_agent_invocation",
    "materialize_trajectories",
    "score_rewards",
    "align_trajectories",
    "compute_advantages",
    "measure_iteration",
    "commit_iteration",
    "publish_policy",
    "report_iteration",
)
TRAINED = ("main", "sub")
_PATIENCE = Patience(attempts=1, start_s=120, run_s=120, server_s=120)


async def _nothing() -> None: ...


def stage(name: str) -> Task[Any, Any]:
    return Task(_nothing, name=name, task_run_name=name, cache_policy=NO_CACHE)


async def _dispatch(policy: str, key: str) -> str:
    child = ChildRun(f"empty-update/{policy}", f"mgrpo-gpu-{policy}", f"empty-{policy}", f"{key}/{policy}", {})
    return str(await completed_run(child, _PATIENCE, lambda: True))


@flow(name="empty-update")
async def empty_update() -> None: ...


@flow(name="empty-iteration")
async def empty_iteration(key: str, children: bool = True) -> None:
    for name in STAGES[:7]:
        await stage(name)()
    if children:
        dispatches = {
            policy: Task(_dispatch, name=f"dispatch_update-{policy}", cache_policy=NO_CACHE) for policy in TRAINED
        }
        await side_by_side(*(dispatch(policy, key) for policy, dispatch in dispatches.items()))
    for name in STAGES[7:]:
        await stage(name)()


@flow(name="stages-alone")
async def stages_alone(count: int) -> None:
    nothing = stage("nothing")
    for _ in range(count):
        await nothing()
