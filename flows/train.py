"""Iterations in a row, until the run has all its config asks for."""

from dataclasses import asdict, dataclass
from typing import Any

from flows.iteration import iteration
from flows.process import keep_open
from infra.store.manifests import newest_committed
from mgrpo_core.config import RunConfig


@dataclass(frozen=True, slots=True)
class Trained:
    """What `mgrpo train` did."""

    run: str
    store: str
    iterations: int
    computed: int
    last_metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def closing_lines(self) -> list[str]:
        """For people, after the last iteration."""
        what = f"{self.computed} iterations computed" if self.computed else "nothing to compute"
        return [f"Run {self.run}: {self.iterations} iterations committed, {what}. Store: {self.store}/{self.run}"]


async def train_run(
    config: RunConfig, *, run: str, store: str, accept_config_change: bool = False, quiet: bool = False
) -> Trained:
    """Compute the run's missing iterations, one flow run each."""
    async with keep_open(run, store, config, quiet=quiet, accept_config_change=accept_config_change) as resources:
        metrics: dict[str, float] = {}
        first = newest_committed(resources.files, run) + 1
        for number in range(first, config.iterations):
            metrics = await iteration(run, store, number)
        return Trained(run, store, max(first, config.iterations), max(0, config.iterations - first), metrics)
