"""Agents: who acts with which policy, what it may do, and what it is rewarded for."""

from pydantic import Field

from mgrpo_core.config.strict import Section


class LimitsConfig(Section):
    """Budgets of one trajectory. Each ends it in a stop reason of its own name."""

    max_turns: int = Field(default=20, ge=1)
    """Generations of one trajectory (20: the released M-GRPO code, for both agents)."""
    max_turn_tokens: int = Field(default=1024, ge=1)
    """Tokens sampled in one turn (1,024: the released code)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in all turns together; None = only the context bounds them."""
    max_observation_tokens: int = Field(default=2048, ge=8)
    """Tokens of one tool result or sub-agent reply that the policy sees; the rest is cut, with a marker."""
    max_tool_calls: int = Field(default=64, ge=0)
    max_delegations: int = Field(default=16, ge=0)
    """Delegations of one trajectory; independent of d, which only says how many are aligned."""


class RewardConfig(Section):
    """Weights of the reward's components. All those of the agent's role must be given, none of the other role's.

    main: format (α₁) and correct (α₂). Sub-agent: format (β₁), main_correct (β₂) and expert (β₃).
    """

    format: float = Field(ge=0, le=1)
    correct: float | None = Field(default=None, ge=0, le=1)
    main_correct: float | None = Field(default=None, ge=0, le=1)
    expert: float | None = Field(default=None, ge=0, le=1)


MAIN_REWARD = RewardConfig(format=0.1, correct=0.9)
SUB_REWARD = RewardConfig(format=0.1, main_correct=0.4, expert=0.5)
"""Both: M-GRPO §5.1."""


class AgentConfig(Section):
    """A role in the team."""

    policy: str
    """Name of the policy it acts with, a key of `policies`."""
    prompt: str = Field(min_length=1)
    """System prompt."""
    description: str = ""
    """What it is for, shown to the agents that may delegate to it."""
    tools: tuple[str, ...] = ()
    """Names of tools it may call: a built-in (`search:geo_facts`) or an import path (`package.module:factory`)."""
    delegates: tuple[str, ...] = ()
    """Names of agents it may delegate to."""
    limits: LimitsConfig = LimitsConfig()
    reward: RewardConfig | None = None
    """None = the paper's weights for the agent's role."""
    verifier: str = "exact_match"
    """How the main agent's answer is checked: `exact_match`, `numeric`, `choice`, or `package.module:function`."""
    judge: str | None = None
    """Who scores a sub-agent's work: a built-in (`facts:geo_facts`, `support`) or an import path."""
    d: int = Field(default=8, ge=1)
    """Slots per rollout that a sub-agent's invocations are aligned to (8: M-GRPO §5.1; the main agent has one)."""
    temperature: float = Field(default=1.0, ge=0)
    trainable: bool = True
    """False: its trajectories are stored and scored, and train nothing."""
    concurrency: int = Field(default=256, ge=1)
    """Invocations of this agent in flight."""
