"""The flow `mgrpo`: one training iteration. What it does is `compute_iteration`.

Prefect imports this file also where nothing is computed: to deploy it, and for a hook of a run that crashed. So what
computes, torch and all, is imported when the run begins.
"""

from prefect import flow
from prefect.runtime import flow_run

from flows.cancellation import cancel_children


def _flow_run_name() -> str:
    parameters = flow_run.parameters
    number = parameters.get("iteration")
    return f"{parameters['run']}-{'next' if number is None else f'{number:04d}'}"


@flow(name="mgrpo", flow_run_name=_flow_run_name, on_cancellation=[cancel_children])
async def iteration(
    run: str, store: str = "mgrpo-store", iteration: int | None = None, config: str | None = None
) -> dict[str, float]:
    """Compute a run's next iteration and commit it.

    Args:
        run: Name of the run.
        store: Folder or fsspec URL of the store.
        iteration: Number of the iteration; empty = the next one.
        config: sha256 of one of the run's stored configs; empty = the newest iteration's.
    """
    from flows.compute_iteration import compute_iteration

    return await compute_iteration(run, store, iteration, config)
