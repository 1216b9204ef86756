"""The config of a training run, and every rule between its sections."""

import hashlib
import json
from typing import Any

from pydantic import Field, model_validator

from mgrpo_core.config.agents import MAIN_REWARD, SUB_REWARD, AgentConfig, RewardConfig
from mgrpo_core.config.learning import AdvantageConfig, AlignmentConfig, LossConfig, UpdateConfig
from mgrpo_core.config.policies import PolicyConfig
from mgrpo_core.config.rules import problems_of
from mgrpo_core.config.running import DataConfig, EvaluationConfig, ExecutionConfig, RolloutConfig, TrackingConfig
from mgrpo_core.config.strict import Section

# What may change between two starts of a run without making it another run: how far it goes, where and how fast it
# runs, and how it is watched.
_NOT_LINEAGE: dict[str, Any] = {
    "iterations": True,
    "evaluation": True,
    "execution": True,
    "tracking": True,
    "rollout": {"concurrency", "reply_deadline_s", "max_rewritten_share"},
    "agents": {"__all__": {"concurrency"}},
    "policies": {"__all__": {"servers", "serving"}},
}


class RunConfig(Section):
    """Everything that decides what a run computes. The store and the run's name are given beside it."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    iterations: int = Field(default=1, ge=1)
    """Iterations that the run shall have in the end."""
    main_agent: str = "main"
    """The agent that gets the query."""
    agents: dict[str, AgentConfig] = Field(min_length=1)
    policies: dict[str, PolicyConfig] = Field(min_length=1)
    data: DataConfig
    rollout: RolloutConfig
    alignment: AlignmentConfig = AlignmentConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    execution: ExecutionConfig = ExecutionConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> "RunConfig":
        problems = problems_of(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def sub_agents(self) -> tuple[str, ...]:
        """Every agent but the main one, in the config's order."""
        return tuple(name for name in self.agents if name != self.main_agent)

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Policies that a trainable agent acts with, in the config's order."""
        used = {agent.policy for agent in self.agents.values() if agent.trainable}
        return tuple(name for name in self.policies if name in used)

    def agents_of(self, policy: str) -> tuple[str, ...]:
        """Trainable agents that act with `policy`."""
        return tuple(name for name, agent in self.agents.items() if agent.trainable and agent.policy == policy)

    def reward_of(self, agent: str) -> RewardConfig:
        """The agent's reward weights, its role's default where none are given."""
        return self.agents[agent].reward or (MAIN_REWARD if agent == self.main_agent else SUB_REWARD)

    def store_folder_of(self, policy: str) -> str:
        """Folder of the policy's versions under the run's `policies/`."""
        return self.policies[policy].store_as or policy

    def update_pool_of(self, policy: str) -> str:
        """Work pool that the policy's updates run on."""
        return self.execution.update_pools.get(policy, f"mgrpo-gpu-{policy}")

    def canonical_json(self) -> str:
        """The whole config with sorted keys: equal configs give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    def sha256(self) -> str:
        """Hash of the whole config, by which the store names it."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def lineage_sha256(self) -> str:
        """Hash of what decides the weights; iterations, evaluation, execution and tracking may change on a resume."""
        kept = self.model_dump(mode="json", exclude=_NOT_LINEAGE)
        for policy in kept["policies"].values():
            if policy["lora"] is None:  # as in runs that were started before there were adapters
                del policy["lora"]
        return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
