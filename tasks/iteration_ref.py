"""Which iteration: what every stage's task is told. References and small numbers only."""

from collections.abc import Mapping
from dataclasses import dataclass

from infra.store.files import FileRef
from mgrpo_core.data_order import DataCursor


@dataclass(frozen=True, slots=True)
class IterationRef:
    """An iteration of a run, opened.

    Attributes:
        versions: the policy versions that it samples with and updates, by policy.
        parent_sha256: of the manifest before it; None for iteration 0.
        query_indices: places of its queries in the dataset, in order; the query at position p is query_indices[p].
        queries: their table.
        cursor: where the data begins after it.
    """

    run: str
    iteration: int
    versions: Mapping[str, int]
    parent_sha256: str | None
    query_indices: tuple[int, ...]
    queries: FileRef
    epoch: int
    cursor: DataCursor

    @property
    def label(self) -> str:
        """`quickstart-0007`."""
        return f"{self.run}-{self.iteration:04d}"
