"""Fakes that play a script: a policy client and a tool in memory, for tests and dry runs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mgrpo_core.dialogue.template import ChatTokenizer
from mgrpo_core.rollout.protocols import Generation, Sampling
from mgrpo_core.seeds import rng_of


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """What a scripted policy is asked. `turn` counts the requests of this trajectory, from 0."""

    trajectory_id: str
    turn: int
    prompt: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


Says = str | Sequence[int] | Exception
"""Text (said and ended by the first stop id), ids as they are, or an error to raise."""


class ScriptedPolicy:
    """A `PolicyClient` that says what its script says, cut at the request's max_tokens like any engine.

    Log-probs are drawn from the request's seed: equal seeds, equal log-probs.
    """

    def __init__(
        self,
        policy: str,
        tokenizer: ChatTokenizer,
        script: Callable[[ScriptedRequest], Says],
        *,
        context_length: int = 4096,
        version: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        """Args:
        policy: its name.
        tokenizer: reads the prompt for the script and encodes what it says.
        script: one request -> what is said.
        context_length: as of an engine; longer requests are refused with a ValueError, as a server would.
        version: of the weights it claims to be.
        delay_s: slept before each reply.
        """
        self._policy = policy
        self._tokenizer = tokenizer
        self._script = script
        self._context_length = context_length
        self._version = version
        self._delay_s = delay_s
        self._turns: dict[str, int] = {}
        self.requests: list[ScriptedRequest] = []
        self.at_work = 0
        self.most_at_work = 0

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def context_length(self) -> int:
        return self._context_length

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, *, trajectory_id: str) -> Generation:
        """What the script says, or raises."""
        if sampling.max_tokens < 1 or len(prompt_ids) + sampling.max_tokens > self._context_length:
            raise ValueError(
                f"400: prompt {len(prompt_ids)} + max_tokens {sampling.max_tokens}, context {self._context_length}."
            )
        turn = self._turns.get(trajectory_id, 0)
        self._turns[trajectory_id] = turn + 1
        ids = tuple(int(token_id) for token_id in prompt_ids)
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        request = ScriptedRequest(trajectory_id, turn, text, ids, sampling)
        self.requests.append(request)
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self.at_work -= 1
        says = self._script(request)
        if isinstance(says, Exception):
            raise says
        return self._generation(says, sampling)

    def _generation(self, says: str | Sequence[int], sampling: Sampling) -> Generation:
        if isinstance(says, str):
            said = self._tokenizer.encode(says, add_special_tokens=False, split_special_tokens=False)
            said = [*said, *sampling.stop_token_ids[:1]]
        else:
            said = [int(token_id) for token_id in says]
        said = said[: sampling.max_tokens]
        logprobs = -rng_of("scripted logprobs", sampling.seed).exponential(size=len(said))
        return Generation(
            token_ids=np.asarray(said, dtype=np.int32),
            logprobs=logprobs.astype(np.float32),
            finish_reason="stop" if said[-1] in sampling.stop_token_ids else "length",
            policy_version=self._version,
        )


@dataclass(frozen=True, slots=True)
class ScriptedTool:
    """A `Tool` that answers by a function; `answer` may raise ToolError or ToolOutageError."""

    name: str
    answer: Callable[[Mapping[str, object]], str]
    description: str = "Looks something up."
    parameters: Mapping[str, object] = field(
        default_factory=lambda: {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        }
    )

    async def call(self, arguments: Mapping[str, object]) -> str:
        """The function's answer, one turn of the event loop later."""
        await asyncio.sleep(0)
        return self.answer(arguments)
