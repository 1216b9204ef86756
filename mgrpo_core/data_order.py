"""Which queries an iteration takes: a permutation per epoch, and a cursor into it."""

from dataclasses import dataclass

import numpy as np

from mgrpo_core.errors import ShapeError
from mgrpo_core.seeds import rng_of


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Where the next batch begins: `position` queries of `epoch` are used up. Part of every commit."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Indices of the queries of one iteration, their epoch, and the cursor after them."""

    index_Q: tuple[int, ...]
    epoch: int
    after: DataCursor


def next_batch(cursor: DataCursor, queries: int, batch: int, seed: int, *, shuffle: bool = True) -> Batch:
    """The next `batch` queries of the epoch's order; fewer at its end, so that each query comes once an epoch.

    A batch never spans two epochs: a query drawn twice in one iteration would be two groups of one name.

    Args:
        cursor: the `after` of the batch before.
        queries: size of the dataset, >= 1.
        batch: queries of an iteration, 1 <= batch <= queries.
        seed: seed of the run; the order is a function of (seed, epoch) alone.
        shuffle: False keeps the dataset's order in every epoch.

    Raises:
        ShapeError: if the batch can never be filled.
    """
    if not 1 <= batch <= queries:
        raise ShapeError(
            f"rollout.queries_per_iteration: {batch} cannot be filled from a dataset of {queries} queries. "
            f"Use 1 to {queries}, or a larger dataset."
        )
    if cursor.position >= queries:
        cursor = DataCursor(cursor.epoch + 1, 0)
    order = rng_of(seed, "data order", cursor.epoch).permutation(queries) if shuffle else np.arange(queries)
    index_Q = tuple(int(index) for index in order[cursor.position : cursor.position + batch])
    return Batch(index_Q, cursor.epoch, DataCursor(cursor.epoch, cursor.position + len(index_Q)))
