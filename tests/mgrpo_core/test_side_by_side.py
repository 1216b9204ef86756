import asyncio

import pytest

from mgrpo_core.side_by_side import first_error, side_by_side


async def give(value: int, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    return value


async def test_results_stand_in_the_order_of_the_arguments():
    assert await side_by_side(give(1, 0.02), give(2)) == [1, 2]


async def test_the_first_failure_rises_as_it_is_and_ends_the_others():
    ended = []

    async def fail() -> None:
        raise KeyError("mine")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("wait")
            raise

    with pytest.raises(KeyError, match="mine"):
        await side_by_side(wait(), fail())
    assert ended == ["wait"]


def test_the_first_error_of_nested_groups_is_found():
    inner = ExceptionGroup("inner", [OSError("first"), ValueError("second")])
    assert isinstance(first_error(ExceptionGroup("outer", [inner])), OSError)
