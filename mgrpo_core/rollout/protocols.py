"""Seams of a rollout: whatever generates, whatever a tool is, whatever judges. Each has an in-tree fake."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from mgrpo_core.trajectories import FinishReason, Turn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. No top-p and no top-k: the trainer's density would have another support.

    temperature 0 means greedy; log-probs are then those at temperature 1.
    """

    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()  # sampled, kept in the ids, and ends the turn


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request sampled.

    Attributes:
        token_ids: sampled ids, a final stop token included, int32 [T], T >= 1.
        logprobs: of those ids under softmax(logits / temperature), float32 [T]; NaN where the engine gave none.
        finish_reason: "stop" if a stop token was sampled, "length" if max_tokens cut the turn.
        policy_version: the version of the weights that sampled.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int


@runtime_checkable
class PolicyClient(Protocol):
    """Generates with one policy: token ids in, token ids out."""

    @property
    def policy(self) -> str: ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt plus completion."""
        ...

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, *, trajectory_id: str) -> Generation:
        """Sample one completion of `prompt_ids` (int32 [T]). `trajectory_id` lets a router keep a prefix cache warm.

        Raises PolicyServerError when no completion could be had; never returns an invented one.
        """
        ...


@runtime_checkable
class Tool(Protocol):
    """Something an agent may call. `parameters` is a JSON schema of the arguments object."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, object]: ...

    async def call(self, arguments: Mapping[str, object]) -> str:
        """Answer as text. Raises ToolError for the policy's fault, ToolOutageError for ours."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What an expert judges: a sub-agent's invocation, without the reference answer of the query."""

    task: str
    reply: str | None
    turns: tuple[Turn, ...]
    observations: tuple[str, ...]


@runtime_checkable
class Judge(Protocol):
    """Scores a sub-agent's work in [0, 1]. `version` goes into the rewards table."""

    @property
    def version(self) -> str: ...

    async def score(self, report: Report) -> float:
        """Raises JudgeError when no score can be had; never a default."""
        ...
