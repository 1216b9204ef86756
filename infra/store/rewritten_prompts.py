"""How often a chat template rewrote what a policy had already seen or said, from two columns and no token."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

REWRITING_COLUMNS = ("turns", "segment_starts")


@dataclass(frozen=True, slots=True)
class NextPrompts:
    """The prompts after the first one of each trajectory.

    Attributes:
        count: all of them.
        rewritten: those that are no exact extension of what was sent and sampled before, id for id: a new segment.
        first: row and turn (0 = the trajectory's first) of the first rewritten one; None where there is none.
    """

    count: int
    rewritten: int
    first: tuple[int, int] | None

    @property
    def share(self) -> float | None:
        """In [0, 1]; None where no trajectory had a second turn."""
        return self.rewritten / self.count if self.count else None


def next_prompts_of(table: pa.Table) -> NextPrompts:
    """Of trajectory rows with REWRITING_COLUMNS.

    A segment that begins at or before the last turn's first token is the prompt of a turn; a later one was never sent.
    """
    turns, segments = (table.column(name).combine_chunks() for name in REWRITING_COLUMNS)
    turns_N, segments_N = (lists.value_lengths().to_numpy(zero_copy_only=False) for lists in (turns, segments))
    turn_start = turns.flatten().field("start").to_numpy(zero_copy_only=False)
    segment_start = segments.flatten().to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(segments_N)), segments_N)
    last_turn_N = np.full(len(turns_N), -1)
    last_turn_N[turns_N > 0] = turn_start[np.cumsum(turns_N)[turns_N > 0] - 1]
    rewritten = np.flatnonzero((segment_start > 0) & (segment_start <= last_turn_N[row]))
    first = None
    if len(rewritten):
        where = int(row[rewritten[0]])
        begin = int(turns_N[:where].sum())
        own = turn_start[begin : begin + int(turns_N[where])]
        first = where, int(np.searchsorted(own, segment_start[rewritten[0]]))
    return NextPrompts(int(np.maximum(turns_N - 1, 0).sum()), len(rewritten), first)
