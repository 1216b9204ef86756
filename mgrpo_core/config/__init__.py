"""What a run is, as one checked model. Parsed once, at the edge; core functions take the values they use."""

from mgrpo_core.config.agents import AgentConfig, LimitsConfig, RewardConfig
from mgrpo_core.config.learning import (
    AdvantageConfig,
    AlignmentConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    UpdateConfig,
)
from mgrpo_core.config.policies import LoraConfig, OptimizerConfig, PolicyConfig, ServingConfig
from mgrpo_core.config.run import RunConfig
from mgrpo_core.config.running import DataConfig, EvaluationConfig, ExecutionConfig, RolloutConfig, TrackingConfig

__all__ = [
    "AdvantageConfig",
    "AgentConfig",
    "AlignmentConfig",
    "CorrectionConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExecutionConfig",
    "KLConfig",
    "LimitsConfig",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ServingConfig",
    "TrackingConfig",
    "UpdateConfig",
]
