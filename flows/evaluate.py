"""The flow `mgrpo-evaluate`: held-out success at the start and after training, and what lies between.

What computes is imported when the run begins: see flows/iteration.py.
"""

from typing import TYPE_CHECKING

from prefect import flow

if TYPE_CHECKING:
    from flows.evaluation import Evaluation


@flow(name="mgrpo-evaluate", flow_run_name="{run}-evaluate")
async def evaluate(
    run: str,
    store: str = "mgrpo-store",
    after: int | None = None,
    questions: int | None = None,
    samples: int | None = None,
) -> "Evaluation":
    """Measure a run's success on the held-out questions.

    Args:
        run: Name of the run.
        store: Folder or fsspec URL of the store.
        after: After how many iterations; empty = the newest.
        questions: How many held-out questions; empty = the config's number.
        samples: Answers a question at the config's temperature; empty = the config's number.
    """
    from flows.evaluation import compute_evaluation

    return await compute_evaluation(run, store, after, questions, samples)
