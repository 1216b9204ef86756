"""Iterations in a row, until the run has all its config asks for. What `mgrpo-train` and `mgrpo train` do."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from flows.evaluate import evaluate
from flows.iteration import iteration
from flows.process import keep_open, tracked_run
from flows.temporary_server import wait_for_server
from infra.store.runs import resume_point
from mgrpo_core.config import RunConfig
from tasks.report import draw_curves, tell_tracker


@dataclass(frozen=True, slots=True)
class Trained:
    """What `mgrpo train` did.

    Attributes:
        iterations: committed ones, in all.
        computed: of them, by this call.
        seconds: of these, evaluations left out.
        orchestration_share: of these seconds, the part in which no stage worked: Prefect's own.
        picture: the curves, on a local disk; None where nothing was drawn.
    """

    run: str
    store: str
    iterations: int
    computed: int
    seconds: float
    orchestration_share: float
    picture: str | None
    last_metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def closing_lines(self) -> list[str]:
        """For people, after the last iteration."""
        what = f"{self.computed} computed now" if self.computed else "nothing left to compute"
        lines = [f"Run {self.run}: {self.iterations} iterations committed, {what}. Store: {self.store}/{self.run}"]
        if self.computed:
            each = self.seconds / self.computed
            lines.append(f"{each:.1f} s an iteration, {self.orchestration_share:.1%} of it in orchestration.")
        return [*lines, f"Curves: {self.picture}"] if self.picture else lines


async def train_run(
    config: RunConfig, *, run: str, store: str, accept_config_change: bool = False, quiet: bool = False
) -> Trained:
    """Compute the run's missing iterations, one flow run each; evaluate every `evaluation.every` of them."""
    async with keep_open(run, store, config, quiet=quiet, accept_config_change=accept_config_change) as resources:
        resume = resume_point(resources.run)
        for warning in resume.warnings:
            resources.progress.console.print(f"Warning: {warning}", markup=False, soft_wrap=True)
        first = resume.iteration
        every = config.evaluation.every
        metrics: dict[str, float] = {}
        in_all = worked = 0.0
        await wait_for_server()
        with tracked_run(resources):
            if resume.newest:  # a process that died between commit and report told nobody
                tell_tracker(resources, resume.newest, resources.history.metrics(first - 1))
            for number in range(first, config.iterations):
                if every and number == 0:
                    await evaluate(run, store, 0)
                started = time.perf_counter()
                metrics = await iteration(run, store, number)
                in_all += time.perf_counter() - started
                worked += resources.clock.worked()
                if every and (number + 1) % every == 0:
                    await evaluate(run, store, number + 1)
            if every and config.iterations % every == 0 and config.iterations > first:
                draw_curves(resources, config.iterations)  # with the last evaluation in it
        computed = max(0, config.iterations - first)
        picture = resources.curves_file if resources.curves_file.exists() else None
        return Trained(
            run=run,
            store=store,
            iterations=max(first, config.iterations),
            computed=computed,
            seconds=round(in_all, 3),
            orchestration_share=round(1 - worked / in_all, 4) if in_all else 0.0,
            picture=str(picture) if picture else None,
            last_metrics=metrics,
        )
