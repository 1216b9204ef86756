"""What `mgrpo-evaluate` does: held-out success at the start and after training, and what lies between."""

from dataclasses import asdict, dataclass
from typing import Any

from flows.evaluate import evaluate
from flows.process import keep_open, resources_of
from flows.temporary_server import wait_for_server
from infra.store.manifests import newest_committed
from infra.store.runs import newest_config, open_store, require_run
from mgrpo_core.evaluation import PairedDifference, paired_difference
from tasks.evaluate_policies import Decoding, HeldOutResult, evaluate_policies, require_iterations
from tasks.report import report_evaluation


@dataclass(frozen=True, slots=True)
class Comparison:
    """One decoding: the start, some later iteration, and their paired difference."""

    decoding: Decoding
    start: HeldOutResult
    later: HeldOutResult
    difference: PairedDifference

    def line(self) -> str:
        """For people."""
        how, questions, start, now, change = self._cells()
        return f"{how:<14} {questions}  start {start}  now {now}  change {change}"

    def row(self) -> str:
        """The same as a row of a Markdown table."""
        return f"| {' | '.join(self._cells())} |"

    def _cells(self) -> tuple[str, str, str, str, str]:
        rate, first, change = self.later.rate, self.start.rate, self.difference
        return (
            f"temperature {self.decoding.temperature:g}" if self.decoding.temperature else "greedy",
            f"{rate.questions} x {self.decoding.samples}",
            f"{first.rate:.3f} [{first.low:.3f}, {first.high:.3f}]",
            f"{rate.rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]",
            f"{change.difference:+.3f} [{change.low:+.3f}, {change.high:+.3f}]",
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `mgrpo evaluate` found."""

    run: str
    after: int
    comparisons: tuple[Comparison, ...]

    def lines(self) -> list[str]:
        """For people: success with 95 % intervals."""
        head = f"Run {self.run}, held-out success after {self.after} iterations (95 % intervals over questions):"
        return [head, *("  " + comparison.line() for comparison in self.comparisons)]

    def markdown(self) -> str:
        """For an artifact."""
        head = f"# {self.run}, held-out success after {self.after} iterations\n\n95 % intervals over questions.\n"
        table = "\n\n| decoding | questions | start | now | change |\n|---|---:|---|---|---|\n"
        return head + table + "\n".join(comparison.row() for comparison in self.comparisons) + "\n"

    def to_json(self) -> dict[str, Any]:
        """For programs: rates and differences, without the single answers."""
        found = [
            {
                "temperature": one.decoding.temperature,
                "samples": one.decoding.samples,
                "start": asdict(one.start.rate),
                "later": asdict(one.later.rate),
                "difference": asdict(one.difference),
            }
            for one in self.comparisons
        ]
        return {"run": self.run, "after": self.after, "held_out": found}


async def compute_evaluation(
    run: str, store: str, after: int | None, questions: int | None, samples: int | None
) -> Evaluation:
    """Measure a run's success. Arguments as the flow has them."""
    async with resources_of(run, store) as resources:
        there = newest_committed(resources.files, run) + 1
        after = there if after is None else after
        require_iterations(resources, after, there)
        settings = resources.config.evaluation
        decodings = (Decoding(samples or settings.samples, settings.temperature), Decoding(1, 0.0))
        comparisons = []
        for decoding in decodings:
            start = await evaluate_policies(resources, 0, decoding, questions or settings.questions)
            later = await evaluate_policies(resources, after, decoding, questions or settings.questions)
            comparisons.append(Comparison(decoding, start, later, paired_difference(start.scores, later.scores)))
        found = Evaluation(run, after, tuple(comparisons))
        await report_evaluation(found.markdown())
        return found


async def evaluate_run(
    *, run: str, store: str, after: int | None, questions: int | None, samples: int | None, quiet: bool
) -> Evaluation:
    """The flow, with bars on a terminal."""
    config = newest_config(require_run(open_store(store), run))
    await wait_for_server()
    async with keep_open(run, store, config, quiet=quiet):
        return await evaluate(run, store, after, questions, samples)
