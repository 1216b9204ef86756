"""What each invocation contributed, and what its group's credit would be without it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.blame.ranking import open_update
from infra.blame.traced import Ranking, Traced
from infra.credit.alignment import ALIGNED_COLUMNS, aligned_columns, members_of
from infra.store.runs import StoredRun
from infra.store.stored_iteration import StoredIteration
from mgrpo_core.credit.leave_one_out import CreditChange, CreditRules, LeaveOneOut, LeftOut, credit_change
from mgrpo_core.errors import ConfigError

_compute: Any = pc  # its functions are made when it is imported; type checkers do not see them
_COLUMNS = (*ALIGNED_COLUMNS, "parent_id", "query_position", "agent_path", "call_index", "reward")
_AT_ONCE = 256  # cases: each copies its group
_CREDIT = ("trajectory_id", "advantage", "weight", "included")


@dataclass(frozen=True, slots=True)
class Delegation(Traced):
    """One invocation of a sub-agent.

    Attributes:
        status: of its reward: scored, failed or absent.
        pull: weight x advantage as stored, 0.0 where it is not in the loss.
        below: invocations under it, which would not have been either.
        change: to the credit of the others, had it not been; see `LeaveOneOut`.
    """

    status: str
    weight: float
    advantage: float
    pull: float
    below: int
    change: CreditChange


@dataclass(frozen=True, slots=True)
class DelegationReport(Ranking[Delegation]):
    """Invocations of a policy's agents, the largest mean change of others' advantages first.

    Attributes:
        invocations: how many there are.
        as_stored: the credit from which changes are counted equals the store's: else another code made it, or it is
            damaged.
    """

    alignment: str
    invocations: int
    as_stored: bool


def delegations(
    run: StoredRun, policy: str, *, store: str, version: int | None = None, iteration: int | None = None, top: int = 10
) -> DelegationReport:
    """Rank the invocations of a policy's agents by what they do to the others. Arguments as of `blame`.

    Raises:
        ConfigError: no such policy, version or iteration, or nobody delegates to its agents.
        TableIntegrityError: what is stored is damaged.
    """
    stored = open_update(run, policy, version, iteration)
    config = stored.config
    agents = [name for name in config.agents_of(policy) if name in config.sub_agents]
    if not agents:
        subs = sorted({config.agents[name].policy for name in config.sub_agents})
        raise ConfigError(
            f"policy {policy!r} acts for no sub-agent, so nobody delegates to it. "
            f"Policies of sub-agents: {', '.join(subs) or 'none'}."
        )
    found, as_stored = delegation_credit(stored, agents)
    found.sort(key=lambda one: (-one.change.mean_change, -abs(one.pull), one.trajectory_id))
    return DelegationReport(
        store=store,
        run=run.name,
        policy=policy,
        iteration=stored.manifest.iteration,
        ranked=tuple(found[:top]),
        alignment=config.alignment.mode,
        invocations=len(found),
        as_stored=as_stored,
    )


def delegation_credit(
    stored: StoredIteration, agents: Sequence[str], position: int | None = None
) -> tuple[list[Delegation], bool]:
    """Every invocation of some sub-agents, and whether credit without anything left out is what is stored.

    Args:
        stored: the iteration.
        agents: sub-agents.
        position: of the query whose invocations are wanted; None = of all.
    """
    config = stored.config
    query_ids: list[str] = stored.table("queries", ["query_id"]).column(0).to_pylist()
    rewards = stored.table("rewards", _COLUMNS)
    if position is not None and config.advantage.normalization != "batch_std":
        # A group is one query's: the others need not be looked at, but where all of them share a deviation.
        rewards, query_ids = rewards.filter(_compute.equal(rewards["query_position"], position)), [query_ids[position]]
    rows = rewards.to_pylist()
    groups = _Groups(stored, query_ids, rewards)
    stored_credit = _stored_credit(stored)
    below = _below(rows)
    wanted = [row for row in rows if row["agent"] in agents and position in (None, row["query_position"])]
    found: list[Delegation] = []
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        cases = [below[row["trajectory_id"]] for row in some]
        for row, case, change in zip(some, cases, groups.changes_without(cases), strict=True):
            found.append(_delegation(row, stored_credit.get(row["trajectory_id"]), len(case) - 1, change))
    return found, groups.equal(stored_credit)


class _Groups:
    """Every sub-agent's scored trajectories, by their ids."""

    def __init__(self, stored: StoredIteration, query_ids: Sequence[str], rewards: pa.Table) -> None:
        config = stored.config
        columns = aligned_columns(rewards)
        reward_N = np.array([one if one is not None else np.nan for one in rewards["reward"].to_pylist()])
        self._ids: dict[str, list[str]] = {}
        self._agents: dict[str, LeaveOneOut] = {}
        self._place: dict[str, tuple[str, int]] = {}
        for agent in config.sub_agents:
            members = members_of(config, stored.manifest.iteration, agent, query_ids, columns)
            rules = CreditRules(
                config.agents[agent].d, config.alignment.mode, config.advantage.normalization, config.advantage.eps
            )
            self._agents[agent] = LeaveOneOut(
                reward_N[members.row_N],
                columns["query_id"][members.row_N].astype(np.str_),
                members.rollout_N,
                members.rollout_key_R,
                rules,
            )
            self._ids[agent] = columns["trajectory_id"][members.row_N].tolist()
            self._place |= {one: (agent, index) for index, one in enumerate(self._ids[agent])}

    def changes_without(self, cases: Sequence[Sequence[str]]) -> list[CreditChange]:
        """For each case an invocation and all under it: each agent's own of them leave that agent's group."""
        parts: list[list[LeftOut]] = [[] for _ in cases]
        gone: dict[str, dict[int, list[int]]] = defaultdict(dict)
        for case, trajectory_ids in enumerate(cases):
            for one in trajectory_ids:
                if one in self._place:  # else it has no reward, and is in no group
                    agent, index = self._place[one]
                    gone[agent].setdefault(case, []).append(index)
        for agent, rows_of in gone.items():
            for case, part in zip(rows_of, self._agents[agent].without_each(list(rows_of.values())), strict=True):
                parts[case].append(part)
        return [credit_change(part) for part in parts]

    def equal(self, stored: Mapping[str, Mapping[str, Any]]) -> bool:
        """Weights and advantages are those of the store, to the bit."""
        return all(
            one in stored and (stored[one]["weight"], stored[one]["advantage"]) == (weight, advantage)
            for agent, ids in self._ids.items()
            for one, weight, advantage in zip(
                ids,
                self._agents[agent].credit.weight_N.tolist(),
                self._agents[agent].credit.advantage_N.tolist(),
                strict=True,
            )
        )


def _stored_credit(stored: StoredIteration) -> dict[str, dict[str, Any]]:
    return {row["trajectory_id"]: row for row in stored.table("advantages", _CREDIT).to_pylist()}


def _below(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Each trajectory with all that was delegated under it, itself first."""
    below = {row["trajectory_id"]: [row["trajectory_id"]] for row in rows}
    # Children before their parents: a longer path hands what it has to the one above it.
    for row in sorted(rows, key=lambda row: -row["agent_path"].count("/")):
        if row["parent_id"] in below:
            below[row["parent_id"]] += below[row["trajectory_id"]]
    return below


def _delegation(
    row: Mapping[str, Any], credit: Mapping[str, Any] | None, below: int, change: CreditChange
) -> Delegation:
    weight, advantage = (credit["weight"], credit["advantage"]) if credit else (0.0, 0.0)
    return Delegation(
        trajectory_id=row["trajectory_id"],
        agent=row["agent"],
        agent_path=row["agent_path"],
        query_position=row["query_position"],
        query_id=row["query_id"],
        rollout_index=row["rollout_index"],
        call_index=row["call_index"],
        status=row["status"],
        reward=row["reward"],
        weight=weight,
        advantage=advantage,
        pull=weight * advantage if credit and credit["included"] else 0.0,
        below=below,
        change=change,
    )
