"""Graders that are a rule, and so can be asked again. What any other one said is kept as it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from infra.credit.grades import Grades, Outcomes, corrects_of
from infra.judges.registry import build_judge
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import Component, ScoreStatus, absent, component_of, scored
from mgrpo_core.rewards.judging import judge_trajectories, report_of
from mgrpo_core.rewards.verifiers import VERIFIERS, Verifier
from mgrpo_core.rollout.protocols import Judge
from mgrpo_core.trajectories import Query, Status, Trajectory

_KEPT_COLUMNS = ("trajectory_id", "agent", "status", "reason", "correct", "expert", "judge_version")


@dataclass(frozen=True, slots=True)
class Graders:
    """A config's graders, as far as they are rules of mgrpo.

    Attributes:
        verifier: None where the config names a function of the user's, which may ask a service.
        judges: by agent, those that are rules.
        kept: what is not among them, for people.
        kept_agents: agents whose judge is no rule.
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


def rule_graders(config: RunConfig) -> Graders:
    """Those of a config. An import path is no rule: what is behind it may be a model, or another version by now."""
    name = config.agents[config.main_agent].verifier
    judges: dict[str, Judge] = {}
    kept = [] if name in VERIFIERS else [f"correct ({name})"]
    others: set[str] = set()
    for agent, settings in config.agents.items():
        if settings.judge is None:
            continue
        judge = _rule(settings.judge)
        if judge is None:
            kept.append(f"expert of {agent} ({settings.judge})")
            others.add(agent)
        else:
            judges[agent] = judge
    return Graders(VERIFIERS.get(name), judges, tuple(kept), frozenset(others))


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
    """What `judge_trajectories` gives, one after the other: a rule waits for nothing, and a task costs more than it."""
    source, opinions = f"judge {judge.version}", dict[str, Component]()
    for one in trajectories:
        if one.status is not Status.INFRA_FAILED:
            try:
                opinion = component_of(await judge.score(report_of(one)), source, unit_interval=True)
            except Exception:  # its words are those of the path that the run took
                return await judge_trajectories(trajectories, judge)
            opinions[one.trajectory_id] = opinion
    return opinions


def _rule(spec: str) -> Judge | None:
    if ":" in spec and not spec.startswith("facts:"):
        return None
    try:
        return build_judge(spec)
    except ConfigError:
        return None


def _stored(row: Mapping[str, object], name: str) -> Component:
    """A component of a row. Only the first one that was missing has left its reason."""
    value, reason = row[name], str(row["reason"] or "")
    if isinstance(value, float):
        return scored(value)
    if reason.startswith(f"{name}: "):
        return Component(ScoreStatus(str(row["status"])), None, reason.removeprefix(f"{name}: "))
    return absent("none is stored")
