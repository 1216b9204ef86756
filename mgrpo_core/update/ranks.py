"""Seam to a sharded update: what the ranks of one policy's update tell each other."""

from typing import Protocol

from torch import Tensor

from mgrpo_core.errors import NonFiniteError


class OtherRankError(NonFiniteError):
    """This rank is sound and stops because another is not; the other's error says what happened."""


class Ranks(Protocol):
    """The processes that update one policy together, each on trajectories of its own.

    The model's gradient must be the mean over ranks, as FSDP and DDP make it.
    """

    @property
    def count(self) -> int:
        """How many, this one included."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks; float64, one axis. Every rank calls it, in the same order."""
        ...

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum, likewise."""
        ...


class OneRank:
    """An update in one process."""

    @property
    def count(self) -> int:
        return 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def maximum(self, values: Tensor) -> Tensor:
        return values
