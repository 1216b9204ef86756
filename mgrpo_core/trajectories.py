"""Records of what happened in a rollout. Frozen; identity is given at birth, never by order of arrival."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from json.encoder import encode_basestring_ascii as quoted
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Query:
    """One problem of a dataset, with its accepted reference answers (any one of them is right)."""

    query_id: str
    question: str
    answers: tuple[str, ...]
    metadata_json: str = "{}"


class Status(StrEnum):
    """Who is to blame for how a trajectory ended."""

    OK = "ok"
    POLICY_FAILED = "policy_failed"  # keeps its reward (usually 0)
    INFRA_FAILED = "infra_failed"  # excluded from statistics and loss, row and reason kept


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWER = "answer"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # the trajectory's budget of sampled tokens is used up
    TURN_TOKEN_LIMIT = "turn_token_limit"  # one turn was cut by its own limit before it ended
    CONTEXT_FULL = "context_full"
    INFRASTRUCTURE = "infrastructure"


ActionKind = Literal["tool", "delegate", "answer", "invalid"]
FinishReason = Literal["stop", "length"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue as text, for people and templates. Token ids, not this, are what is trained on."""

    role: Role
    content: str
    name: str | None = None  # the tool or sub-agent that speaks, for role "tool"


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of a policy and what came of it.

    `start` and `stop` are offsets into the trajectory's token stream: token_ids[start:stop] were sampled in this turn.
    """

    start: int
    stop: int
    finish_reason: FinishReason
    policy_version: int
    seed: int
    action: ActionKind
    action_name: str | None = None  # tool or sub-agent addressed, as the policy wrote it
    arguments_json: str | None = None  # as the policy wrote it, never re-serialised
    error: str | None = None  # the policy's fault: what the parser, the schema or the tool said
    observation_tokens: int = 0  # tokens of the reply that the policy saw
    observation_chars: int = 0  # size of the reply before it was cut to the budget
    observation_cut: bool = False


@dataclass(frozen=True, slots=True)
class PathStep:
    """One level of an agent path: which agent, by which invocation of its parent (0 for the main agent)."""

    agent: str
    call_index: int


@dataclass(frozen=True, slots=True)
class TrajectoryKey:
    """What a trajectory is, before it exists. `path` leads from the main agent down to this one."""

    run: str
    iteration: int
    query_id: str
    rollout_index: int
    path: tuple[PathStep, ...]
    _id: str | None = field(default=None, init=False, repr=False, compare=False)  # once it was asked for

    @property
    def agent(self) -> str:
        return self.path[-1].agent

    @property
    def call_index(self) -> int:
        return self.path[-1].call_index

    @property
    def depth(self) -> int:
        """0 for the main agent."""
        return len(self.path) - 1

    @property
    def parent(self) -> "TrajectoryKey | None":
        if len(self.path) == 1:
            return None
        return TrajectoryKey(self.run, self.iteration, self.query_id, self.rollout_index, self.path[:-1])

    def child(self, agent: str, call_index: int) -> "TrajectoryKey":
        """The key of this trajectory's invocation number `call_index`."""
        path = (*self.path, PathStep(agent, call_index))
        return TrajectoryKey(self.run, self.iteration, self.query_id, self.rollout_index, path)

    @property
    def agent_path(self) -> str:
        """As text: `main/0:searcher/2:reader`. To sort by, take `call_order`: as text, 10 comes before 2."""
        head, *rest = self.path
        return "/".join([head.agent, *(f"{step.call_index}:{step.agent}" for step in rest)])

    @property
    def call_order(self) -> tuple[tuple[int, str], ...]:
        """Sorts the trajectories of a rollout: parents before children, siblings in the order of their calls."""
        return tuple((step.call_index, step.agent) for step in self.path)

    @property
    def trajectory_id(self) -> str:
        """32 hexadecimal digits of sha256 over every part of the key, as a JSON list without blanks."""
        if self._id is None:
            text = (
                f"[{quoted(self.run)},{self.iteration},{quoted(self.query_id)},{self.rollout_index},"
                f"{quoted(self.agent_path)}]"
            )
            object.__setattr__(self, "_id", hashlib.sha256(text.encode()).hexdigest()[:32])
        assert self._id is not None
        return self._id


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's token stream in one invocation, from its first prompt token to its stop.

    Attributes:
        token_ids: prompt, sampled and observed tokens in the order the policy saw them, int32 [T].
        loss_mask: True where the policy sampled the token, bool [T].
        logprobs: log-probability of each sampled token under the sampling policy at `temperature`, float32 [T];
            NaN where the token was not sampled or the engine gave none.
        segment_starts: offsets at which a new context begins, first always 0. More than one only where the chat
            template rewrote history: each segment is then the context that the policy really saw.
        task: what the agent was asked: the question, or the parent's delegation.
        reply: what it answered; None where it never did.
        failure: reason of an infrastructure failure; None otherwise.
    """

    key: TrajectoryKey
    policy: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    segment_starts: tuple[int, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    task: str
    reply: str | None
    temperature: float
    status: Status
    stop_reason: StopReason
    failure: str | None = None

    @property
    def trajectory_id(self) -> str:
        return self.key.trajectory_id

    @property
    def parent_id(self) -> str | None:
        parent = self.key.parent
        return parent.trajectory_id if parent else None

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a query: the main trajectory first, then every sub-agent trajectory under it, by agent path."""

    query_id: str
    rollout_index: int
    trajectories: tuple[Trajectory, ...]
