"""What `mgrpo inspect` found: queries, rollouts, or one rollout. Read from the store, for people and for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.compute as pc

from infra.blame.delegations import delegation_credit
from infra.inspection.queries import QueryLine, find_query, query_lines
from infra.inspection.rollouts import RolloutLine, rollout_lines
from infra.inspection.wanted import matching
from infra.store.runs import StoredRun
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.traces.filters import Sign, TraceFilter
from infra.traces.index import trajectory_index
from infra.traces.rollout import RolloutTrace, TraceNode, read_rollout
from mgrpo_core.credit.leave_one_out import CreditChange
from mgrpo_core.errors import ConfigError
from mgrpo_core.trajectories import Query, Trajectory

_compute: Any = pc


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to see.

    Attributes:
        query: id or position of it; None = all queries.
        rollout: of the query; None = all of them.
        agent: name of an agent, or the path of one trajectory, as in `main/0:searcher`.
        text, sign, status: see `TraceFilter`.
        tokens: ids, mask and log-probs of a rollout.
    """

    query: str | None = None
    rollout: int | None = None
    agent: str | None = None
    text: str | None = None
    sign: Sign | None = None
    status: str | None = None
    tokens: bool = False

    @property
    def path(self) -> str | None:
        """The agent, where it is a path."""
        return self.agent if self.agent is not None and "/" in self.agent else None

    @property
    def filter(self) -> TraceFilter:
        """All but the path."""
        name = None if self.path else self.agent
        return TraceFilter(agent=name, text=self.text, sign=self.sign, status=self.status)


@dataclass(frozen=True, slots=True)
class FoundQueries:
    """An iteration's queries of which a trajectory is wanted."""

    stored: StoredIteration
    lines: tuple[QueryLine, ...]

    def to_json(self) -> dict[str, Any]:
        return {**_place(self.stored), "queries": [asdict(one) for one in self.lines]}


@dataclass(frozen=True, slots=True)
class FoundRollouts:
    """A query's rollouts of which a trajectory is wanted."""

    stored: StoredIteration
    position: int
    query: Query
    lines: tuple[RolloutLine, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **_place(self.stored),
            "position": self.position,
            "query": asdict(self.query),
            "rollouts": [asdict(one) for one in self.lines],
        }


@dataclass(frozen=True, slots=True)
class FoundRollout:
    """One rollout.

    Attributes:
        nodes: the topmost trajectories that are wanted.
        without: by trajectory id, what others' credit would be without the invocation.
        texts: of each token, by trajectory id; empty where tokens were not asked for, None where no tokenizer is there.
    """

    stored: StoredIteration
    position: int
    trace: RolloutTrace
    nodes: tuple[TraceNode, ...]
    without: dict[str, CreditChange]
    texts: dict[str, list[str] | None]

    def to_json(self) -> dict[str, Any]:
        return {
            **_place(self.stored),
            "position": self.position,
            "query": asdict(self.trace.query),
            "rollout": self.trace.root.trajectory.key.rollout_index,
            "trajectories": [self._node(node) for node in self.nodes],
        }

    def _node(self, node: TraceNode) -> dict[str, Any]:
        one = node.trajectory
        change = self.without.get(one.trajectory_id)
        found: dict[str, Any] = {
            "trajectory_id": one.trajectory_id,
            "agent": one.key.agent,
            "agent_path": one.key.agent_path,
            "policy": one.policy,
            "status": str(one.status),
            "stop_reason": str(one.stop_reason),
            "failure": one.failure,
            "task": one.task,
            "reply": one.reply,
            "turns": [asdict(turn) for turn in one.turns],
            "messages": [asdict(message) for message in one.messages],
            "reward": None if node.reward is None else asdict(node.reward),
            "advantage": None if node.advantage is None else asdict(node.advantage),
            "without_it": None if change is None else asdict(change),
            "children": [self._node(child) for child in node.children],
        }
        if one.trajectory_id in self.texts:
            found["tokens"] = _tokens(one, self.texts[one.trajectory_id])
        return found


def inspect_iteration(run: StoredRun, iteration: int, asked: Asked) -> FoundQueries | FoundRollouts | FoundRollout:
    """Read what is asked for, and no more.

    Raises:
        ConfigError, StoreError: no such iteration, query, rollout or agent; says which there are.
        TableIntegrityError: what is stored is damaged.
    """
    stored = open_stored(run, iteration)
    _check_agent(stored, asked.agent)
    if asked.query is None and asked.rollout is not None:
        raise ConfigError("--rollout: of which query? Give its id, or its position as @0.")
    if asked.rollout is None and asked.tokens:
        raise ConfigError("--tokens: of which rollout? Give a query, and --rollout.")
    if asked.query is None:
        return FoundQueries(stored, tuple(query_lines(stored, asked.filter, asked.path)))
    position, query = find_query(stored, asked.query)
    if asked.rollout is None:
        return FoundRollouts(
            stored, position, query, tuple(rollout_lines(stored, position, query, asked.filter, asked.path))
        )
    trace = read_rollout(stored, query.query_id, asked.rollout, tokens=asked.tokens)
    filtered = asked.path is not None or asked.filter != TraceFilter()
    nodes = matching_nodes(trace.root, _wanted(stored, trace, asked)) if filtered else [trace.root]
    credit, _ = delegation_credit(stored, stored.config.sub_agents, position)
    own = {one.trajectory_id: one.change for one in credit if one.rollout_index == asked.rollout}
    texts = _texts(run, stored, nodes) if asked.tokens else {}
    return FoundRollout(stored, position, trace, tuple(nodes), own, texts)


def matching_nodes(root: TraceNode, wanted: set[str]) -> list[TraceNode]:
    """The topmost trajectories that are wanted: each is shown with all under it."""
    if root.trajectory.trajectory_id in wanted:
        return [root]
    return [found for child in root.children for found in matching_nodes(child, wanted)]


def _wanted(stored: StoredIteration, trace: RolloutTrace, asked: Asked) -> set[str]:
    key = trace.root.trajectory.key
    index = trajectory_index(stored)
    index = index.filter(_compute.equal(index["query_id"], key.query_id))
    index = index.filter(_compute.equal(index["rollout_index"], key.rollout_index))
    return set(matching(stored, index, asked.filter, asked.path)["trajectory_id"].to_pylist())


def _check_agent(stored: StoredIteration, agent: str | None) -> None:
    if agent is not None and "/" not in agent and agent not in stored.config.agents:
        raise ConfigError(
            f"--agent {agent!r}: no such agent. There are {', '.join(stored.config.agents)}; or give the path of a "
            "trajectory, such as main/0:searcher."
        )


def _texts(run: StoredRun, stored: StoredIteration, nodes: Sequence[TraceNode]) -> dict[str, list[str] | None]:
    from infra.traces.token_text import TokenTexts

    texts = TokenTexts(run)
    found: dict[str, list[str] | None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        one = node.trajectory
        found[one.trajectory_id] = texts.texts(stored, one.policy, one.token_ids.tolist())
        waiting.extend(node.children)
    return found


def _tokens(one: Trajectory, texts: list[str] | None) -> list[dict[str, Any]]:
    logprobs = one.logprobs.tolist()
    return [
        {
            "id": token,
            "text": None if texts is None else texts[place],
            "sampled": sampled,
            "logprob": logprobs[place] if sampled and math.isfinite(logprobs[place]) else None,
        }
        for place, (token, sampled) in enumerate(zip(one.token_ids.tolist(), one.loss_mask.tolist(), strict=True))
    ]


def _place(stored: StoredIteration) -> dict[str, Any]:
    return {"run": stored.manifest.run, "iteration": stored.manifest.iteration}
