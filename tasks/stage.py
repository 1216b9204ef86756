"""A stage of an iteration: one Prefect task, timed, never cached.

Nothing is cached by Prefect: effects are idempotent by key in the store, and its default key would take two samplings
of equal arguments for one.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE

from infra.resources import RunResources

P = ParamSpec("P")
R = TypeVar("R")


def stage(body: Callable[Concatenate[RunResources, P], Awaitable[R]] | None = None, /, **options: Any) -> Any:
    """Decorator: an async function whose first argument is the run's resources becomes a task.

    Args:
        body: the function, where the decorator stands bare.
        options: of `prefect.task`, such as `task_run_name`; without one a run is called as its stage.
    """
    if body is None:
        return functools.partial(stage, **options)

    @functools.wraps(body)
    async def timed(resources: RunResources, *args: P.args, **kwargs: P.kwargs) -> R:
        start = time.perf_counter()
        try:
            return await body(resources, *args, **kwargs)
        finally:
            resources.clock.add(body.__name__, start, time.perf_counter())

    return Task(timed, cache_policy=NO_CACHE, **{"task_run_name": body.__name__, **options})
