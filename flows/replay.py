"""The flow `mgrpo-replay`: an iteration recomputed from the store, and the verdict as an artifact.

Reads the run and writes nothing into it. What computes is imported when the run begins: see flows/iteration.py.
"""

import asyncio
from typing import Any, Literal

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Failed


@flow(name="mgrpo-replay", flow_run_name="{run}-{iteration}-replay")
async def replay(
    run: str,
    iteration: int,
    store: str = "mgrpo-store",
    through: Literal["advantages", "update"] = "update",
    overrides: list[str] | None = None,
) -> dict[str, Any] | State[Any]:
    """Recompute a committed iteration; fails where anything differs from what is stored.

    Args:
        run: Name of the run.
        iteration: Number of the iteration.
        store: Folder or fsspec URL of the store.
        through: The last stage; `advantages` needs no model.
        overrides: What if: `key=value` each, lists make a grid; nothing is then compared with the store's bits.
    """
    if overrides:
        from infra.replay.render_what_if import what_if_markdown
        from infra.replay.what_if import what_if_stored

        found = await asyncio.to_thread(what_if_stored, store, run, iteration, overrides, through)
        await acreate_markdown_artifact(what_if_markdown(found), key="mgrpo-what-if")
        return found.to_json()
    from infra.replay.iteration import replay_stored

    report = await asyncio.to_thread(replay_stored, store, run, iteration, through)
    await acreate_markdown_artifact(report.markdown(), key="mgrpo-replay", description=report.conclusion())
    return report.to_json() if report.equal else Failed(message=report.conclusion())
