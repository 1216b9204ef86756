"""The seam of experiment tracking: what a training run tells whoever watches it, and an in-memory fake."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which training run this is, whoever starts it again: its name and the store it lives in."""

    run: str
    store: str

    def __post_init__(self) -> None:
        if "://" not in self.store:
            object.__setattr__(self, "store", str(Path(self.store).resolve()))


class Outcome(StrEnum):
    """How a process left its run. Words of MLflow."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """What is told once an iteration is committed.

    Attributes:
        iteration: the step of every metric.
        metrics: finite numbers under any names; what is not finite is counted and named, never sent.
        policy_versions: number of the version that each policy has now.
        manifest_json: the iteration's manifest, as committed; "" where none is told.
    """

    iteration: int
    metrics: Mapping[str, float]
    policy_versions: Mapping[str, int] = field(default_factory=dict)
    manifest_json: str = ""

    def finite(self) -> dict[str, float]:
        """The metrics that can be stored."""
        return {name: float(value) for name, value in self.metrics.items() if math.isfinite(value)}

    def nonfinite(self) -> tuple[str, ...]:
        """Names of the metrics that are NaN or infinite, sorted."""
        return tuple(sorted(name for name, value in self.metrics.items() if not math.isfinite(value)))


@runtime_checkable
class Tracker(Protocol):
    """Told about a run while it trains. No method raises for the tracker's own trouble, and none takes long.

    The same iteration told twice (a retry, a resume) is stored once, metric by metric.
    """

    @property
    def troubles(self) -> int:
        """How often something could not be stored."""
        ...

    @property
    def link(self) -> str | None:
        """Page of the run for people; None where no server shows one, or it is not known yet."""
        ...

    def start(self, identity: RunIdentity, config: Mapping[str, object]) -> None:
        """Open the run of this identity, the same one again after a resume. `config` is the whole, resolved config."""
        ...

    def log_iteration(self, record: IterationRecord) -> None: ...

    def log_picture(self, name: str, png: bytes) -> None:
        """Keep a PNG under a file name such as `curves.png`; a later one of that name replaces it."""
        ...

    def finish(self, outcome: Outcome) -> None:
        """Store what is still on its way, and how the process left the run."""
        ...


@dataclass(slots=True)
class MemoryTracker:
    """A `Tracker` that keeps everything in plain fields, for tests and for runs that nobody watches."""

    link: str | None = None
    identity: RunIdentity | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    nonfinite: dict[int, tuple[str, ...]] = field(default_factory=dict)
    policy_versions: dict[str, int] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    troubles: int = 0

    def start(self, identity: RunIdentity, config: Mapping[str, object]) -> None:
        self.identity, self.config, self.outcome = identity, config, None

    def log_iteration(self, record: IterationRecord) -> None:
        for name, value in record.finite().items():
            self.metrics.setdefault(name, {}).setdefault(record.iteration, value)
        if record.nonfinite():
            self.nonfinite[record.iteration] = record.nonfinite()
        self.policy_versions.update(record.policy_versions)

    def log_picture(self, name: str, png: bytes) -> None:
        self.pictures[name] = png

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
