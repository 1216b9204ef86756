"""What a variation does to a policy's update."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A policy's update beside the run's.

    Gradients are of the whole iteration's loss at the version that is updated, before any step and before clipping to a
    norm.

    Attributes:
        cosine: between the two gradients; None where one of them is 0.
        stored_norm: L2 norm of the run's gradient.
        norm: of the variation's.
        stored_clip_fraction: tokens whose ratio met a bound of the clip range, over all steps of the run's update.
        clip_fraction: of the variation's.
        optimizer_steps: that the variation's update takes; 0 = it leaves the policy as it was.
        approx_kl: mean of r - 1 - log r over the iteration's sampled tokens, nats, r = variation's updated policy /
            run's updated policy: how far apart the two updates end, on tokens of the version before both.
    """

    policy: str
    cosine: float | None
    stored_norm: float
    norm: float
    stored_clip_fraction: float
    clip_fraction: float
    optimizer_steps: int
    approx_kl: float
