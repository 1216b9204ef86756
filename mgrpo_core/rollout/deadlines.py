"""How long a controller waits for whatever it asks. Each wait ends, and its error names who was waited for."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from mgrpo_core.errors import InfrastructureError, ToolError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest waits, in seconds. Clients and tools may have shorter ones of their own, and retry within these.

    Attributes:
        generation_s: for one turn of a policy, the engine's queue included.
        tool_s: for one tool call.
    """

    generation_s: float = 1800.0
    tool_s: float = 300.0


async def within(
    deadline_s: float, awaitable: Awaitable[Result], *, who: str, error: type[InfrastructureError]
) -> Result:
    """The awaitable's result, if it comes in time.

    Raises: ToolError as it is, the policy's fault. Everything else, a deadline or a bug in a client or tool, is ours:
        `error`, with `who` and the reason.
    """
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            return await awaitable
    except ToolError:
        raise
    except InfrastructureError as down:
        raise error(f"{who}: {down}") from down
    except Exception as broken:
        reason = f"nothing came back within {deadline_s:g} s" if deadline.expired() else repr(broken)
        raise error(f"{who}: {reason}") from broken
