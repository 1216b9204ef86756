"""Which graders a replay asks: those that are a rule. What any other one said is kept as it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from infra.credit.grades import Grades, Outcomes, corrects_of
from infra.judges.facts import FactJudge
from infra.judges.registry import build_judge
from mgrpo_core.config import RunConfig
from mgrpo_core.rewards.component import Component, ScoreStatus, absent, component_of, scored
from mgrpo_core.rewards.judging import judge_trajectories, report_of
from mgrpo_core.rewards.rule_judge import SupportJudge
from mgrpo_core.rewards.verifiers import VERIFIERS, Verifier, verifier_of
from mgrpo_core.rollout.protocols import Judge
from mgrpo_core.trajectories import Query, Status, Trajectory

_RULES = (FactJudge, SupportJudge)
_KEPT_COLUMNS = ("trajectory_id", "agent", "status", "reason", "correct", "expert", "judge_version")


@dataclass(frozen=True, slots=True)
class Graders:
    """A config's graders, as far as a replay asks them.

    Attributes:
        verifier: None where it is not asked.
        judges: by agent, those that are asked.
        kept: what is not among them, for people.
        kept_agents: agents whose judge is not asked.
    """

    verifier: Verifier | None
    judges: Mapping[str, Judge]
    kept: tuple[str, ...]
    kept_agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeptGrades:
    """Components as the rewards table has them, for graders that are no rules."""

    corrects: Mapping[str, Component] = field(default_factory=dict)
    experts: Mapping[str, Component] = field(default_factory=dict)
    judge_versions: Mapping[str, str] = field(default_factory=dict)


def graders_of(config: RunConfig, stored: RunConfig) -> Graders:
    """The graders of a config for rollouts that were graded under the stored one.

    A grader by import path may be a model, or another version by now: it is kept. Where the config names another one
    than the stored one, it has said nothing yet, and is asked on purpose.

    Raises: ConfigError if a grader that is to be asked cannot be had.
    """
    name = config.agents[config.main_agent].verifier
    ask = name in VERIFIERS or name != stored.agents[stored.main_agent].verifier
    kept = [] if ask else [f"correct ({name})"]
    judges: dict[str, Judge] = {}
    others: set[str] = set()
    for agent, settings in config.agents.items():
        spec = settings.judge
        if spec is None:
            continue
        if is_rule(spec) or spec != stored.agents[agent].judge:
            judges[agent] = build_judge(spec)
        else:
            kept.append(f"expert of {agent} ({spec})")
            others.add(agent)
    return Graders(verifier_of(name) if ask else None, judges, tuple(kept), frozenset(others))


def is_rule(judge: str) -> bool:
    """Whether a judge's name is one of mgrpo's own, which are rules; else it is an import path."""
    return ":" not in judge or judge.startswith("facts:")


def kept_grades(graders: Graders, rewards: pa.Table) -> KeptGrades:
    """What the rewards table says for graders that are no rules."""
    if not graders.kept:
        return KeptGrades()
    rows = rewards.select(_KEPT_COLUMNS).to_pylist()
    judged = [row for row in rows if row["agent"] in graders.kept_agents]
    return KeptGrades(
        corrects={row["trajectory_id"]: _stored(row, "correct") for row in rows} if graders.verifier is None else {},
        experts={row["trajectory_id"]: _stored(row, "expert") for row in judged},
        judge_versions={row["agent"]: row["judge_version"] for row in judged if row["judge_version"] is not None},
    )


async def regrade(
    config: RunConfig, graders: Graders, kept: KeptGrades, queries: Sequence[Query], outcomes: Outcomes
) -> Grades:
    """Ask the rules again; fill in what is kept."""
    nothing = absent("no row in the rewards table")
    mains = outcomes[config.main_agent]
    if graders.verifier is None:
        corrects = {one.trajectory_id: kept.corrects.get(one.trajectory_id, nothing) for one in mains}
    else:
        corrects = corrects_of(config, graders.verifier, queries, mains)
    experts = dict(kept.experts)
    for agent, judge in graders.judges.items():
        experts |= await _opinions(judge, outcomes[agent])
    versions = {agent: judge.version for agent, judge in graders.judges.items()}
    return Grades(corrects, experts, {**versions, **kept.judge_versions})


async def _opinions(judge: Judge, trajectories: Sequence[Trajectory]) -> dict[str, Component]:
    """What `judge_trajectories` gives. Rules are asked in turn: they wait for nothing, and a task costs more than one.

    Raises: ConfigError, as there.
    """
    if not isinstance(judge, _RULES):
        return await judge_trajectories(trajectories, judge)
    source = f"judge {judge.version}"
    return {
        one.trajectory_id: component_of(await judge.score(report_of(one)), source, unit_interval=True)
        for one in trajectories
        if one.status is not Status.INFRA_FAILED
    }


def _stored(row: Mapping[str, object], name: str) -> Component:
    """A component of a row. Only the first one that was missing has left its reason."""
    value, reason = row[name], str(row["reason"] or "")
    if isinstance(value, float):
        return scored(value)
    if reason.startswith(f"{name}: "):
        return Component(ScoreStatus(str(row["status"])), None, reason.removeprefix(f"{name}: "))
    return absent("none is stored")
