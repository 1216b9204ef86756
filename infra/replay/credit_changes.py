"""What a variation does to credit: advantages that change sign, groups that gain or lose their signal."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mgrpo_core.config import RunConfig


@dataclass(frozen=True, slots=True)
class AgentChange:
    """An agent's credit beside the run's.

    Attributes:
        trajectories: all of the agent's.
        included: that enter the loss, stored.
        included_now: under the variation.
        sign_changes: trajectories whose advantage is above 0 in one and below 0 in the other.
        groups: of the agent: one a query.
        gained: groups without signal in the store and with one now: some member enters the loss.
        lost: the reverse.
        mean_change: mean |difference of weight x advantage| over all trajectories.
    """

    agent: str
    trajectories: int
    included: int
    included_now: int
    sign_changes: int
    groups: int
    gained: int
    lost: int
    mean_change: float


_COLUMNS = ("trajectory_id", "agent", "query_id", "advantage", "weight", "included")


def credit_changes(before: pa.Table, after: pa.Table, config: RunConfig) -> tuple[AgentChange, ...]:
    """Compare two advantages tables of the same trajectories, agent by agent.

    Args:
        before: the stored one.
        after: the variation's.
        config: of either.
    """
    then, now = _columns(before), _columns(after)
    place = {one: index for index, one in enumerate(now["trajectory_id"])}
    order = np.array([place[one] for one in then["trajectory_id"]], dtype=np.int64)
    now = {name: values[order] for name, values in now.items()}
    return tuple(_change(agent, then, now) for agent in config.agents)


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    texts = ("trajectory_id", "agent", "query_id")
    return {
        name: np.array(table.column(name).to_pylist(), dtype=object) if name in texts else table.column(name).to_numpy()
        for name in _COLUMNS
    }


def _change(agent: str, then: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> AgentChange:
    own_N = then["agent"] == agent
    before_N, after_N = then["advantage"][own_N], now["advantage"][own_N]
    moved_N = np.abs(now["weight"][own_N] * after_N - then["weight"][own_N] * before_N)
    signal_then, signal_now = _signal(then, own_N), _signal(now, own_N)
    return AgentChange(
        agent=agent,
        trajectories=int(own_N.sum()),
        included=int(then["included"][own_N].sum()),
        included_now=int(now["included"][own_N].sum()),
        sign_changes=int((before_N * after_N < 0).sum()),
        groups=len(set(then["query_id"][own_N])),
        gained=len(signal_now - signal_then),
        lost=len(signal_then - signal_now),
        mean_change=float(moved_N.mean()) if moved_N.size else 0.0,
    )


def _signal(columns: dict[str, np.ndarray], own_N: np.ndarray) -> set[str]:
    """Queries of which a member enters the loss."""
    return set(columns["query_id"][own_N & columns["included"].astype(bool)])
