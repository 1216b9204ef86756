"""From components to rewards: what M-GRPO pays a main agent and its sub-agents."""

from collections.abc import Mapping
from dataclasses import dataclass

from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import Component, ScoreStatus, absent, failed, scored
from mgrpo_core.rewards.format import format_valid
from mgrpo_core.trajectories import Rollout, Status, Trajectory


@dataclass(frozen=True, slots=True)
class MainWeights:
    """α₁ and α₂. Defaults: M-GRPO §5.1."""

    format: float = 0.1
    correct: float = 0.9


@dataclass(frozen=True, slots=True)
class SubWeights:
    """β₁, β₂ and β₃. Defaults: M-GRPO §5.1."""

    format: float = 0.1
    main_correct: float = 0.4
    expert: float = 0.5


@dataclass(frozen=True, slots=True)
class TrajectoryReward:
    """A trajectory's reward and every part of it.

    Attributes:
        reward: a number if and only if `status` is SCORED.
        reason: why there is no reward; None where there is one.
        format: 1 or 0; absent only where the trajectory failed through no fault of the policy.
        correct: of a main trajectory; absent for a sub-agent's.
        main_correct: of a sub-agent's trajectory: 1 if its rollout's main trajectory is valid and correct.
        expert: of a sub-agent's trajectory: what the judge said.
    """

    trajectory_id: str
    agent: str
    status: ScoreStatus
    reward: float | None
    reason: str | None
    format: Component
    correct: Component
    main_correct: Component
    expert: Component


NOT_OF_ITS_ROLE = absent("not a part of this role's reward")
NOT_GRADED = absent("never graded")


def main_reward(main: Trajectory, correct: Component, weights: MainWeights) -> TrajectoryReward:
    """R_M = α₁·format + α₂·correct if the format is valid, else 0.

    Args:
        main: a main trajectory.
        correct: of its answer.
        weights: α.
    Source: M-GRPO, arXiv:2511.13288, Eq. 4.
    """
    formatted = _format_of(main)
    status, reward, reason = _weighted(
        main, formatted, [("format", weights.format, formatted), ("correct", weights.correct, correct)]
    )
    return TrajectoryReward(
        main.trajectory_id,
        main.key.agent,
        status,
        reward,
        reason,
        formatted,
        correct,
        NOT_OF_ITS_ROLE,
        NOT_OF_ITS_ROLE,
    )


def sub_reward(sub: Trajectory, main_correct: Component, expert: Component, weights: SubWeights) -> TrajectoryReward:
    """R_S = β₁·format + β₂·main_correct + β₃·expert if the format is valid, else 0.

    Args:
        sub: a sub-agent's trajectory.
        main_correct: of its rollout, see `main_correct_of`.
        expert: the judge's score of this invocation.
        weights: β.
    Source: M-GRPO, arXiv:2511.13288, Eq. 5.
    """
    formatted = _format_of(sub)
    status, reward, reason = _weighted(
        sub,
        formatted,
        [
            ("format", weights.format, formatted),
            ("main_correct", weights.main_correct, main_correct),
            ("expert", weights.expert, expert),
        ],
    )
    return TrajectoryReward(
        sub.trajectory_id, sub.key.agent, status, reward, reason, formatted, NOT_OF_ITS_ROLE, main_correct, expert
    )


def main_correct_of(main: Trajectory, correct: Component) -> Component:
    """What every sub-agent of a rollout is paid for: 1[main format valid and correct] for a binary verifier.

    Binary, not R_M: β already sums to 1, and the main agent's format would count twice. A graded correctness is handed
    on as it is where the main format is valid.
    """
    formatted = _format_of(main)
    if formatted.value is None:
        return failed(formatted.reason or "the main trajectory has no format")
    return correct if formatted.value == 1 else scored(0.0)


def score_rollout(
    rollout: Rollout,
    correct: Component,
    experts: Mapping[str, Component],
    *,
    main_weights: MainWeights,
    sub_weights: Mapping[str, SubWeights],
) -> tuple[TrajectoryReward, ...]:
    """Rewards of every trajectory of a rollout, in its order.

    Args:
        rollout: main trajectory first.
        correct: of the main trajectory's answer.
        experts: by trajectory id; a trajectory that is not in it was never graded.
        main_weights: α.
        sub_weights: β, by agent.
    Raises: ConfigError if an agent of the rollout has no weights.
    """
    main, *subs = rollout.trajectories
    shared = main_correct_of(main, correct)
    rewards = [main_reward(main, correct, main_weights)]
    for sub in subs:
        if sub.key.agent not in sub_weights:
            raise ConfigError(
                f"agent {sub.key.agent}: no reward weights, but rollout {rollout.query_id}/{rollout.rollout_index} has "
                f"a trajectory of it. Given: {', '.join(sorted(sub_weights)) or 'none'}."
            )
        expert = experts.get(sub.trajectory_id, NOT_GRADED)
        rewards.append(sub_reward(sub, shared, expert, sub_weights[sub.key.agent]))
    return tuple(rewards)


def _format_of(trajectory: Trajectory) -> Component:
    if trajectory.status is Status.INFRA_FAILED:
        return absent(trajectory.failure or "infrastructure failure")
    return scored(float(format_valid(trajectory)))


def _weighted(
    trajectory: Trajectory, formatted: Component, parts: list[tuple[str, float, Component]]
) -> tuple[ScoreStatus, float | None, str | None]:
    if trajectory.status is Status.INFRA_FAILED:
        return ScoreStatus.FAILED, None, trajectory.failure or "infrastructure failure"
    if formatted.value == 0:  # the zero policy asks for no other part, so none can be missing
        return ScoreStatus.SCORED, 0.0, None
    reward = 0.0
    # A failed part outweighs an absent one: the row must say that something is to be repaired.
    for name, weight, part in sorted(parts, key=lambda one: one[2].status is not ScoreStatus.FAILED):
        if weight == 0:
            continue
        if part.value is None:
            return part.status, None, f"{name}: {part.reason}"
        reward += weight * part.value
    return ScoreStatus.SCORED, reward, None
