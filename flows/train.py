"""The flow `mgrpo-train`: iterations in a row, until the run has as many as asked for.

What computes is imported when the run begins: see flows/iteration.py.
"""

from prefect import flow

from flows.cancellation import cancel_children


@flow(name="mgrpo-train", flow_run_name="{run}-train", on_cancellation=[cancel_children])
async def train(
    run: str, store: str = "mgrpo-store", iterations: int | None = None, config: str | None = None
) -> dict[str, float]:
    """Compute a run's iterations one after another, until it has as many as asked for.

    Args:
        run: Name of the run.
        store: Folder or fsspec URL of the store.
        iterations: How many the run shall have in the end; empty = its config's number.
        config: sha256 of one of the run's stored configs; empty = the newest iteration's.
    """
    from flows.process import stored_config
    from flows.train_run import train_run

    settings = stored_config(run, store, config)
    if iterations is not None:
        settings = settings.model_copy(update={"iterations": iterations})
    return (await train_run(settings, run=run, store=store)).last_metrics
