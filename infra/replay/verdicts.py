"""What a replay says of an iteration: a verdict a stage, and the first thing that differs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

Through = Literal["advantages", "update"]
"""The last stage to recompute. `advantages` needs no model and no torch."""


class Outcome(StrEnum):
    """How what was recomputed compares with what is stored."""

    EQUAL = "equal bit for bit"
    CLOSE = "equal within the tolerance"
    DIFFERS = "differs"
    UNREADABLE = "cannot be read"  # what is stored is damaged or missing: nothing to compare with
    SKIPPED = "not recomputed"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        agent: whose; None for what belongs to no agent.
        trajectory_id: of which trajectory; None where it belongs to none, such as a weight.
        where: column of a row, token of a trajectory, or number of a tensor.
        stored: the run's value.
        recomputed: this replay's.
    """

    agent: str | None
    trajectory_id: str | None
    where: str
    stored: str
    recomputed: str

    def line(self) -> str:
        """For people."""
        who = [part for part in (self.agent, self.trajectory_id and f"trajectory {self.trajectory_id}") if part]
        return f"{', '.join([*who, self.where])}: stored {self.stored}, recomputed {self.recomputed}"


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """One stage's.

    Attributes:
        stage: `manifest`, `rewards`, `alignment`, `advantages`, `log-probs main`, `update main`, …
        compared: how many rows or numbers.
        unit: of what `compared` counts.
        differing: how many of them differ beyond the tolerance.
        tolerance: up to which difference numbers count as close, in words; None where there is none.
        largest: difference of two numbers.
        first: the first thing that differs beyond the tolerance, or, where all is close, the first that is not equal.
        kept: components that were taken from the store, because nothing here can compute them again.
        reason: why it was not recomputed or cannot be read.
    """

    stage: str
    outcome: Outcome
    compared: int = 0
    unit: str = "rows"
    differing: int = 0
    tolerance: str | None = None
    largest: float = 0.0
    first: Difference | None = None
    kept: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def sound(self) -> bool:
        return self.outcome not in (Outcome.DIFFERS, Outcome.UNREADABLE)

    def words(self) -> str:
        """What there is to say beside the outcome, on one line."""
        found: list[str] = []
        if self.outcome is Outcome.CLOSE:
            found.append(f"largest difference {self.largest:.3g}, tolerance {self.tolerance}")
        if self.outcome is Outcome.DIFFERS:
            found.append(f"{self.differing} of {self.compared} {self.unit} differ; the first")
        if self.first is not None:
            found.append(self.first.line())
        if self.kept:
            found.append(f"kept as stored: {', '.join(self.kept)}")
        if self.reason:
            found.append(self.reason)
        return ". ".join(found)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found.

    Attributes:
        notes: what a reader should know of how it was made, such as other code.
    """

    run: str
    iteration: int
    through: Through
    verdicts: tuple[StageVerdict, ...]
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] | None = None

    @property
    def equal(self) -> bool:
        """Nothing differs, and nothing is damaged."""
        return all(verdict.sound for verdict in self.verdicts)

    @property
    def first(self) -> StageVerdict | None:
        """The first stage that differs or cannot be read."""
        return next((verdict for verdict in self.verdicts if not verdict.sound), None)

    def conclusion(self) -> str:
        """One sentence."""
        label = f"Iteration {self.iteration} of run {self.run}, through {self.through}"
        if self.first is not None:
            return f"{label}: {self.first.stage} {self.first.outcome}. {self.first.words()}"
        by_outcome = {
            outcome: ", ".join(verdict.stage for verdict in self.verdicts if verdict.outcome is outcome)
            for outcome in (Outcome.CLOSE, Outcome.SKIPPED)
        }
        said = [str(Outcome.EQUAL), *(f"{stages} {outcome}" for outcome, stages in by_outcome.items() if stages)]
        if kept := sorted({part for verdict in self.verdicts for part in verdict.kept}):
            said.append(f"kept as stored: {', '.join(kept)}")
        return f"{label}: {'; '.join(said)}."

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "run": self.run,
            "iteration": self.iteration,
            "through": self.through,
            "equal": self.equal,
            "conclusion": self.conclusion(),
            "stages": [{**asdict(verdict), "outcome": verdict.outcome.name.lower()} for verdict in self.verdicts],
            "notes": list(self.notes),
            "seconds": dict(self.seconds or {}),
        }

    def markdown(self) -> str:
        """For an artifact."""
        rows = [
            f"| {verdict.stage} | {verdict.outcome} | {verdict.compared} {verdict.unit} | {escaped(verdict.words())} |"
            for verdict in self.verdicts
        ]
        head = ["| stage | verdict | compared | |", "|---|---|---:|---|"]
        notes = [f"- {escaped(note)}" for note in self.notes]
        return "\n".join([f"**{escaped(self.conclusion())}**", "", *head, *rows, "", *notes]) + "\n"


def unreadable(stage: str, error: Exception) -> StageVerdict:
    """What is stored cannot be read."""
    return StageVerdict(stage, Outcome.UNREADABLE, reason=str(error))


def merged(verdicts: Sequence[StageVerdict]) -> StageVerdict:
    """One verdict over parts of a stage, in order."""
    worst = [Outcome.DIFFERS, Outcome.CLOSE, Outcome.EQUAL]
    outcome = min((verdict.outcome for verdict in verdicts), key=worst.index, default=Outcome.EQUAL)
    return StageVerdict(
        stage=verdicts[0].stage,
        outcome=outcome,
        compared=sum(verdict.compared for verdict in verdicts),
        unit=verdicts[0].unit,
        differing=sum(verdict.differing for verdict in verdicts),
        tolerance=verdicts[0].tolerance,
        largest=max(verdict.largest for verdict in verdicts),
        first=next((verdict.first for verdict in verdicts if verdict.outcome is outcome and verdict.first), None),
        kept=verdicts[0].kept,
    )


def escaped(text: str) -> str:
    """Text from a store as it stands, for Markdown: no row and no markup of its own."""
    flat = " ".join(text.split())
    return "".join(f"\\{char}" if char in "|`*_<>[]\\" else char for char in flat)
