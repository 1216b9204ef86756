"""Agents and the team they form."""

from collections.abc import Mapping
from dataclasses import dataclass

from mgrpo_core.dialogue.actions import DELEGATION_SCHEMA
from mgrpo_core.dialogue.template import ToolSignature
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.protocols import Tool


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one trajectory.

    Turns and tokens end it in a stop reason of their own. A call beyond `max_tool_calls` or `max_delegations` is
    refused with a message to the policy, which can still answer. Defaults: the released M-GRPO code where it has one.
    """

    max_turns: int = 20
    max_turn_tokens: int = 1024
    max_tokens: int | None = None  # None: only the context bounds the sampled tokens of all turns together
    max_observation_tokens: int = 2048
    max_tool_calls: int = 64
    max_delegations: int = 16

    def __post_init__(self) -> None:
        at_least_1 = ("max_turns", "max_turn_tokens", "max_observation_tokens")
        for name in at_least_1:
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}: {getattr(self, name)}, expected at least 1.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"limits.max_tokens: {self.max_tokens}, expected at least 1, or None for no limit.")


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A role: a prompt, what it may call, and the policy it acts with. `description` is shown to who may call it."""

    name: str
    policy: str
    system_prompt: str
    description: str = ""
    tools: tuple[Tool, ...] = ()
    delegates: tuple[str, ...] = ()
    limits: Limits = Limits()
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Team:
    """The agents of a run. Depth and number of delegations are bounded independently, whoever may call whom.

    Attributes:
        main: the agent that gets the query.
        max_depth: levels of sub-agents under the main agent.
        max_rollout_delegations: delegations of one rollout, at all levels together.
    """

    main: str
    agents: Mapping[str, AgentSpec]
    max_depth: int = 4
    max_rollout_delegations: int = 256

    def __post_init__(self) -> None:
        known = ", ".join(sorted(self.agents)) or "none"
        if self.main not in self.agents:
            raise ConfigError(f"team.main: {self.main!r} is no agent. Name one of: {known}.")
        for name, spec in self.agents.items():
            if spec.name != name:
                raise ConfigError(f"team.agents: {name!r} holds the agent {spec.name!r}. Use the agent's own name.")
            for delegate in spec.delegates:
                if delegate not in self.agents:
                    raise ConfigError(f"agent {name}: its delegate {delegate!r} is no agent. Name one of: {known}.")

    @property
    def sub_agents(self) -> tuple[str, ...]:
        """Agents that somebody may delegate to, in the team's order."""
        called = {delegate for spec in self.agents.values() for delegate in spec.delegates}
        return tuple(name for name in self.agents if name in called)

    def signatures_of(self, name: str) -> tuple[ToolSignature, ...]:
        """What the template tells this agent about its tools and its delegates, in the order they are given."""
        return (*tool_signatures(self.agents[name]), *self._delegate_signatures(name))

    def _delegate_signatures(self, name: str) -> tuple[ToolSignature, ...]:
        specs = (self.agents[delegate] for delegate in self.agents[name].delegates)
        return tuple(ToolSignature(spec.name, spec.description, DELEGATION_SCHEMA) for spec in specs)


def tool_signatures(spec: AgentSpec) -> tuple[ToolSignature, ...]:
    """Name, description and schema of an agent's tools."""
    return tuple(ToolSignature(tool.name, tool.description, tool.parameters) for tool in spec.tools)
