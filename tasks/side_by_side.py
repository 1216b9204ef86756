"""Stages that run at once: the first failure ends the others and is the one that is told."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def side_by_side(*stages: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in the order of `stages`. If one raises, the others are cancelled, and its error rises as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(stage) for stage in stages]
    except BaseExceptionGroup as failed:
        raise _first(failed) from None
    return [stage.result() for stage in running]


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = failed.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
