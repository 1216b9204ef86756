"""Which stage makes a policy's next version: in this process, or on the policy's work pool."""

from collections.abc import Callable, Coroutine
from typing import Any

from infra.resources import RunResources
from infra.store.files import FileRef
from infra.training.policy_update import PolicyUpdate
from mgrpo_core.config import RunConfig
from tasks.dispatch_update import dispatch_update
from tasks.iteration_ref import IterationRef
from tasks.tables import TrajectoryTables
from tasks.update_policy import update_policy

UpdateStage = Callable[[RunResources, IterationRef, str, TrajectoryTables, FileRef], Coroutine[Any, Any, PolicyUpdate]]

_STAGES: dict[str, UpdateStage] = {"embedded": update_policy, "work_pools": dispatch_update}


def update_stage(config: RunConfig) -> UpdateStage:
    """The stage that the config's `execution.mode` names."""
    return _STAGES[config.execution.mode]
