"""Coroutines that run at once: the first failure ends the others and is the one that is told."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast


async def side_by_side(*running: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in the order of the arguments. If one raises, the others are cancelled, and its error rises as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in running]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed
    return [task.result() for task in tasks]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups: who catches errors by type should not meet a group."""
    inner = group.exceptions[0]
    if isinstance(inner, BaseExceptionGroup):
        return first_error(cast("BaseExceptionGroup[BaseException]", inner))
    return inner
