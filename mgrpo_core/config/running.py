"""Where queries come from, how many rollouts, where it runs, how it is watched."""

from typing import Literal

from pydantic import Field

from mgrpo_core.config.strict import Section


class DataConfig(Section):
    """Query files. A source is a JSONL file or URL, or `geo_facts:` or `sums:` and `train` or `held_out`."""

    train: str
    held_out: str | None = None
    shuffle: bool = True
    """A new permutation each epoch, a function of the seed and the epoch."""


class RolloutConfig(Section):
    """The size of an iteration."""

    queries_per_iteration: int = Field(ge=1)
    rollouts_per_query: int = Field(default=8, ge=1)
    """K. 8: M-GRPO §5.1."""
    concurrency: int = Field(default=256, ge=1)
    """Rollouts in flight."""
    min_scored_share: float = Field(default=0.5, ge=0, le=1)
    """Share of rollouts that must end without an infrastructure failure; below it the iteration fails."""
    max_tool_error_share: float = Field(default=1.0, ge=0, le=1)
    """Share of tool calls and delegations that may be refused; above it the iteration fails."""
    max_rewritten_share: float = Field(default=0.1, ge=0, le=1)
    """Share of an agent's later prompts that its chat template may rewrite; above it the iteration fails; 1 = any.

    0.1: a template that keeps history rewrites none but the odd reply, one that drops reasoning nearly all.
    """
    max_depth: int = Field(default=4, ge=0)
    """Levels of sub-agents under the main agent."""
    max_delegations: int = Field(default=256, ge=0)
    """Delegations of one rollout, all levels together."""
    reply_deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait for one reply of a sub-agent."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions by which weights that sampled a trajectory may be behind those that train on it.

    Above 0, rollouts of the next iterations begin while policies are updated; 0 = none do.
    """


class EvaluationConfig(Section):
    """Success on the held-out questions."""

    questions: int | None = Field(default=None, ge=1)
    """The first so many of them; None = all."""
    samples: int = Field(default=4, ge=1)
    """Answers per question at `temperature`; greedy decoding adds one."""
    temperature: float = Field(default=1.0, gt=0)
    every: int = Field(default=0, ge=0)
    """Iterations between evaluations during training; 0 = none."""


class ExecutionConfig(Section):
    """Where the stages run. None of it decides what is computed."""

    mode: Literal["embedded", "work_pools"] = "embedded"
    """embedded: one process, updates in it. work_pools: each policy's update is a run of its own on its own pool."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of each engine and update; None = share the machine's cores."""
    iteration_pool: str = "mgrpo-cpu"
    """Work pool of the iteration itself."""
    update_pools: dict[str, str] = Field(default_factory=dict)
    """Work pool of a policy's update, by policy; `mgrpo-gpu-<policy>` where none is named."""
    update_processes: dict[str, int] = Field(default_factory=dict)
    """Processes that share a policy's update (torchrun, FSDP2), by policy; 1 where none is given."""
    update_env: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment of a policy's update, by policy, such as CUDA_VISIBLE_DEVICES. Never credentials."""
    update_attempts: int = Field(default=2, ge=1)
    """How often one iteration starts an update on its pool before it fails."""
    start_deadline_s: float = Field(default=3600.0, gt=0)
    """Longest wait for a worker to take an update."""
    update_deadline_s: float = Field(default=24 * 3600.0, gt=0)
    """Longest run of an update, after which it is cancelled."""
    server_patience_s: float = Field(default=600.0, gt=0)
    """How long a Prefect server that does not answer is asked again."""
    single_writer: bool = False
    """Promise that one machine at a time writes the store: for object stores that ignore conditional writes."""


class TrackingConfig(Section):
    """MLflow."""

    mlflow: bool = True
    mlflow_uri: str | None = None
    """None = MLFLOW_TRACKING_URI, or a SQLite file beside a local store."""
    experiment: str = "mgrpo"
