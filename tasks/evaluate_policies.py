"""Success of a team on held-out questions, at some policy versions, sampled and greedy; kept in the store."""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any

from infra.resources import RunResources
from infra.store import layout
from infra.store.manifests import read_manifest
from infra.store.runs import policy_versions
from infra.team import team_of
from mgrpo_core.errors import ConfigError, IncompleteIterationError
from mgrpo_core.evaluation import SuccessRate, success_rate
from mgrpo_core.rewards.format import format_valid
from mgrpo_core.rewards.verifiers import correctness
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.seeds import seed_of
from mgrpo_core.trajectories import Query, Rollout, Status
from tasks.stage import stage


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an evaluation samples: answers a question, at a temperature (0 = greedy)."""

    samples: int
    temperature: float


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """Success after so many iterations.

    Attributes:
        scores: 1 or 0 for each graded answer, by question; what our side lost is left out.
        lost: answers that an infrastructure failure took.
    """

    run: str
    after: int
    decoding: Decoding
    rate: SuccessRate
    scores: dict[str, list[float]]
    lost: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@stage(task_run_name="evaluate-after-{after}")
async def evaluate_policies(
    resources: RunResources, after: int, decoding: Decoding, questions: int | None
) -> HeldOutResult:
    """Answer the held-out questions with the policies as they were after `after` iterations.

    The same question, sample and seed draw the same noise whenever a run is evaluated after that many iterations, and
    other noise after others. A result that the store has is returned as it is.

    Raises:
        ConfigError: the run has fewer iterations, or names no held-out questions.
        IncompleteIterationError: an infrastructure failure took more answers than rollout.min_scored_share allows.
    """
    config, files, run = resources.config, resources.files, resources.run
    queries = resources.held_out()[:questions]
    name = f"{len(queries)}x{decoding.samples}-t{decoding.temperature:g}"
    path = layout.evaluation_file(run.name, after, name)
    if files.exists(path):
        return _from_json(json.loads(files.read(path)))
    newest = read_manifest(files, run.name, after - 1) if after else None
    await asyncio.to_thread(resources.serve, policy_versions(config, newest))
    scores: dict[str, list[float]] = {query.query_id: [] for query in queries}
    lost = 0
    with resources.progress.bar(f"evaluate after {after}", len(queries), "questions") as bar:

        async def grade(query: Query, rollouts: tuple[Rollout, ...]) -> None:
            nonlocal lost
            for rollout in rollouts:
                main = rollout.trajectories[0]
                correct = correctness(resources.verifier, main.reply, query)
                if main.status is Status.INFRA_FAILED or correct.value is None:
                    lost += 1
                else:
                    scores[query.query_id].append(correct.value * format_valid(main))
            graded.append(query.query_id)
            bar.move(len(graded))

        graded: list[str] = []
        stages = RolloutStages(
            team_of(config, temperature=decoding.temperature),
            RolloutPlan(
                run=run.name,
                iteration=after,
                seed=seed_of(config.seed, "evaluate"),
                rollouts_per_query=decoding.samples,
                concurrency=config.rollout.concurrency,
                reply_deadline_s=config.rollout.reply_deadline_s,
            ),
            clients=resources.clients,
            tokenizers=resources.tokenizers,  # type: ignore[arg-type]
        )
        limits = {name: agent.concurrency for name, agent in config.agents.items()}
        await stages.run(queries, grade, limits)
    answers = len(queries) * decoding.samples
    if answers - lost < answers * config.rollout.min_scored_share or lost == answers:
        raise IncompleteIterationError(
            f"{run.name}: {lost} of {answers} held-out answers were lost to failures of ours."
        )
    result = HeldOutResult(run.name, after, decoding, success_rate(scores), scores, lost)
    files.write(path, (json.dumps(result.to_json(), sort_keys=True, indent=1) + "\n").encode())
    return result


def require_iterations(resources: RunResources, after: int, there: int) -> None:
    """Raises: ConfigError if the run has fewer than `after` iterations."""
    if after > there:
        raise ConfigError(
            f"run {resources.run.name!r} has {there} iterations, {after} were asked for. "
            f"Give 0 (the start) to {there}, or train on."
        )


def _from_json(raw: dict[str, Any]) -> HeldOutResult:
    raw["decoding"] = Decoding(**raw["decoding"])
    raw["rate"] = SuccessRate(**raw["rate"])
    return HeldOutResult(**raw)
