"""One agent's trajectory: generate, parse, act, until it answers or a budget ends it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import numpy as np

from mgrpo_core.dialogue.actions import Action, Answer, Delegation, Invalid, ToolCall, parse_action
from mgrpo_core.dialogue.transcript import Transcript
from mgrpo_core.errors import InfrastructureError, PolicyServerError, ToolError, ToolOutageError
from mgrpo_core.rollout.actor import Actor
from mgrpo_core.rollout.deadlines import Deadlines, within
from mgrpo_core.rollout.ledger import RolloutLedger
from mgrpo_core.rollout.protocols import Generation, Sampling
from mgrpo_core.seeds import seed_of
from mgrpo_core.trajectories import Status, StopReason, Trajectory, TrajectoryKey, Turn

Delegate = Callable[[TrajectoryKey, str], Awaitable[Trajectory]]
"""Has a sub-agent do a task under the given key; raises InfrastructureError where no trajectory came of it."""


class Controller:
    """Runs one trajectory.

    The policy's faults stay in the trajectory: a malformed action is answered by its error, a used-up budget is a stop
    reason. Faults of ours (server, tool, a sub-agent's) end it as INFRA_FAILED with the reason; retries belong to
    clients and tools. Anything else that is raised is a bug or a wrong setting, and rises.
    """

    def __init__(
        self,
        actor: Actor,
        key: TrajectoryKey,
        task: str,
        *,
        seed: int,
        ledger: RolloutLedger,
        delegate: Delegate,
        deadlines: Deadlines,
    ) -> None:
        """Args:
        actor: the agent.
        key: which trajectory this is; every turn's seed follows from it.
        task: what the agent is asked.
        seed: of the run.
        ledger: of the rollout; it bounds delegations over all levels.
        delegate: how a sub-agent is asked; its wait has a deadline of its own.
        deadlines: of the other waits.
        """
        self._actor = actor
        self._limits = actor.spec.limits
        self._key = key
        self._task = task
        self._seed = seed
        self._ledger = ledger
        self._delegate = delegate
        self._deadlines = deadlines
        self._transcript = Transcript(actor.template, system=actor.spec.system_prompt, user=task)
        self._turns: list[Turn] = []
        self._sampled = 0
        self._tool_calls = 0
        self._delegations = 0
        self._reply: str | None = None

    async def run(self) -> Trajectory:
        """Play until the trajectory ends."""
        try:
            stop_reason = await self._play()
        except InfrastructureError as error:
            return self.failed(str(error))
        status = Status.OK if stop_reason is StopReason.ANSWER else Status.POLICY_FAILED
        return self._trajectory(status, stop_reason, None)

    def failed(self, reason: str) -> Trajectory:
        """The trajectory as far as it came, marked as ended by a fault of ours."""
        return self._trajectory(Status.INFRA_FAILED, StopReason.INFRASTRUCTURE, reason)

    async def _play(self) -> StopReason:
        while True:
            max_tokens, if_cut = self._room()
            if max_tokens < 1:
                return if_cut
            action = await self._turn(max_tokens)
            if action is None:
                return if_cut
            if isinstance(action, Answer):
                self._reply = action.text
                return StopReason.ANSWER
            # Nobody would read the reply: not worth a sub-agent's work, nor a row of it that is trained on.
            if len(self._turns) >= self._limits.max_turns:
                return StopReason.TURN_LIMIT
            if self._tokens_left() < 1:
                return StopReason.TOKEN_LIMIT
            text, error = await self._act(action)
            if not self._observe(text, error):
                return StopReason.CONTEXT_FULL

    def _tokens_left(self) -> int:
        # A number that no context reaches stands for "no limit".
        return 2**31 if self._limits.max_tokens is None else self._limits.max_tokens - self._sampled

    def _room(self) -> tuple[int, StopReason]:
        """Most tokens of the next turn, prompt + completion <= context, and what has ended it if it is cut there."""
        context_left = self._actor.client.context_length - self._transcript.context_tokens
        return min(
            (self._limits.max_turn_tokens, StopReason.TURN_TOKEN_LIMIT),
            (self._tokens_left(), StopReason.TOKEN_LIMIT),
            (context_left, StopReason.CONTEXT_FULL),
            key=lambda bound: bound[0],
        )

    async def _turn(self, max_tokens: int) -> Action | None:
        """Sample one turn and read it; None if it was cut."""
        index = len(self._turns)
        key = self._key
        seed = seed_of(self._seed, key.iteration, key.query_id, key.rollout_index, key.agent_path, index)
        sampling = Sampling(self._actor.spec.temperature, max_tokens, seed, self._actor.template.stop_token_ids)
        generation = await self._generate(sampling)
        start = self._transcript.length
        opening = self._transcript.opening
        text = self._transcript.sampled(generation.token_ids, generation.logprobs, generation.finish_reason)
        self._sampled += len(generation.token_ids)
        turn = Turn(
            start=start,
            stop=self._transcript.length,
            finish_reason=generation.finish_reason,
            policy_version=generation.policy_version,
            seed=seed,
            action="invalid",
        )
        if generation.finish_reason == "length":
            # Truncated, not malformed: nothing is read into half a call, however it looks.
            self._turns.append(replace(turn, error=f"cut after {max_tokens} tokens"))
            return None
        action = parse_action(opening + text, self._actor.menu)
        self._turns.append(_recorded(turn, action))
        return action

    async def _generate(self, sampling: Sampling) -> Generation:
        client = self._actor.client
        generation = await within(
            self._deadlines.generation_s,
            client.generate(self._transcript.context_ids, sampling, trajectory_id=self._key.trajectory_id),
            who=f"policy {client.policy}",
            error=PolicyServerError,
        )
        problem = _problem(generation, sampling)
        if problem:
            raise PolicyServerError(f"policy {client.policy}: {problem}. The client breaks its contract; correct it.")
        return generation

    async def _act(self, action: Action) -> tuple[str, str | None]:
        """What the policy is told, and what it did wrong if it did."""
        match action:
            case Invalid(error=error):
                return f"Error: {error}", error
            case ToolCall():
                return await self._call(action)
            case Delegation():
                return await self._ask(action)
            case Answer():
                raise AssertionError("an answer ends the trajectory")

    async def _call(self, action: ToolCall) -> tuple[str, str | None]:
        if self._tool_calls >= self._limits.max_tool_calls:
            return _refused(f"the limit of {self._limits.max_tool_calls} tool calls is reached")
        self._tool_calls += 1
        tool = self._actor.tools[action.name]
        try:
            result = cast(
                "object",
                await within(
                    self._deadlines.tool_s,
                    tool.call(action.arguments),
                    who=f"tool {action.name}",
                    error=ToolOutageError,
                ),
            )
        except ToolError as error:
            return f"Error: {error}", str(error) or type(error).__name__
        if not isinstance(result, str):
            raise ToolOutageError(f"tool {action.name}: returned {type(result).__name__}, expected text (str).")
        return result, None

    async def _ask(self, action: Delegation) -> tuple[str, str | None]:
        if self._key.depth >= self._actor.max_depth:
            return _refused(f"no delegation below level {self._actor.max_depth}")
        if self._delegations >= self._limits.max_delegations:
            return _refused(f"the limit of {self._limits.max_delegations} delegations is reached")
        if not self._ledger.take_delegation():
            return _refused(f"the team's limit of {self._ledger.max_delegations} delegations is reached")
        key = self._key.child(action.agent, self._delegations)
        self._delegations += 1
        task = action.task if action.context is None else f"{action.task}\n\n{action.context}"
        child = await self._delegate(key, task)
        if child.status is Status.INFRA_FAILED:
            raise InfrastructureError(f"{key.agent_path}: {child.failure}")
        if child.reply is None:
            return f"{action.agent} ended without an answer ({child.stop_reason}).", None
        return child.reply, None

    def _observe(self, text: str, error: str | None) -> bool:
        """Hand the reply to the policy; False if the context has no room for it."""
        turn = self._turns[-1]
        seen = self._transcript.observe(
            text,
            name=turn.action_name if turn.action in ("tool", "delegate") else None,
            max_tokens=self._limits.max_observation_tokens,
            context_length=self._actor.client.context_length,
            reply_tokens=min(self._limits.max_turn_tokens, self._tokens_left()),
        )
        if seen is None:
            self._turns[-1] = replace(turn, error=error, observation_chars=len(text), observation_cut=True)
            return False
        self._turns[-1] = replace(
            turn,
            error=error,
            observation_tokens=seen.tokens,
            observation_chars=seen.chars,
            observation_cut=seen.cut,
        )
        return True

    def _trajectory(self, status: Status, stop_reason: StopReason, failure: str | None) -> Trajectory:
        stream = self._transcript.stream()
        return Trajectory(
            key=self._key,
            policy=self._actor.spec.policy,
            token_ids=stream.token_ids,
            loss_mask=stream.loss_mask,
            logprobs=stream.logprobs,
            segment_starts=stream.segment_starts,
            turns=tuple(self._turns),
            messages=self._transcript.messages,
            task=self._task,
            reply=self._reply,
            temperature=self._actor.spec.temperature,
            status=status,
            stop_reason=stop_reason,
            failure=failure,
        )


def _recorded(turn: Turn, action: Action) -> Turn:
    match action:
        case ToolCall(name=name, arguments_json=source):
            return replace(turn, action="tool", action_name=name, arguments_json=source)
        case Delegation(agent=name, arguments_json=source):
            return replace(turn, action="delegate", action_name=name, arguments_json=source)
        case Answer():
            return replace(turn, action="answer")
        case Invalid(error=error, name=name, arguments_json=source):
            return replace(turn, action="invalid", action_name=name, arguments_json=source, error=error)


def _refused(why: str) -> tuple[str, str]:
    return f"Refused: {why}. Answer with what you have.", f"refused: {why}"


def _problem(generation: Generation, sampling: Sampling) -> str | None:
    """How a generation breaks the contract of `PolicyClient`, or None."""
    ids, logprobs = generation.token_ids, generation.logprobs
    if ids.ndim != 1 or len(ids) < 1 or logprobs.shape != ids.shape:
        return f"token ids {ids.shape} and logprobs {logprobs.shape}, expected one logprob an id and at least one id"
    if len(ids) > sampling.max_tokens:
        return f"{len(ids)} tokens, asked for at most {sampling.max_tokens}"
    if generation.finish_reason == "stop" and int(ids[-1]) not in sampling.stop_token_ids:
        return f"finished by stop, but its last id {int(ids[-1])} is none of the stop ids {sampling.stop_token_ids}"
    if np.any(logprobs > 1e-3) or np.any(np.isinf(logprobs)):
        return "logprobs above 0 or infinite"
    return None
