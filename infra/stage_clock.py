"""How long the stages of an iteration worked, and how long nobody did: the orchestration's share."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StageClock:
    """Intervals of work by stage, in seconds of one monotonic clock. Stages may overlap."""

    _intervals: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, stage: str, start: float, stop: float) -> None:
        """Note that `stage` worked from `start` to `stop`."""
        self._intervals.append((stage, start, stop))

    def clear(self) -> None:
        """Forget, before the next iteration."""
        self._intervals.clear()

    def seconds(self) -> dict[str, float]:
        """From the first start to the last stop of each stage: tasks of one stage that run side by side count once."""
        spans: dict[str, tuple[float, float]] = {}
        for stage, start, stop in self._intervals:
            first, last = spans.get(stage, (start, stop))
            spans[stage] = (min(first, start), max(last, stop))
        return {stage: last - first for stage, (first, last) in spans.items()}

    def worked(self) -> float:
        """Seconds in which at least one stage worked."""
        total, reached = 0.0, float("-inf")
        for _, start, stop in sorted(self._intervals, key=lambda interval: interval[1]):
            total += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
        return total
