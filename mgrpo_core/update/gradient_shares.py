"""Which trajectory moved a policy: its own part of the gradient of the whole loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mgrpo_core.update.dropout import dropout_off
from mgrpo_core.update.gradients import Gradients
from mgrpo_core.update.training_trajectory import TrainingTrajectory
from mgrpo_core.update.update_settings import UpdateSettings

Gradient = list[Tensor]
"""A tensor a trainable parameter, in the order of the model, on the CPU."""


@dataclass(frozen=True, slots=True)
class GradientShare:
    """A trajectory's part g_i of the gradient g = sum g_i of the whole loss.

    Attributes:
        norm: L2 norm of g_i.
        cosine: between g_i and g; None where one of them is 0.
        share: g_i g / |g|^2, how much of the whole it makes: over all trajectories these sum to 1. Below 0 = it pulled
            against the rest. None where g is 0.
    """

    norm: float
    cosine: float | None
    share: float | None


class LossGradient:
    """The gradient of an update's loss over all of its trajectories as one batch, at the model as it stands.

    Before any step and before clipping to `max_grad_norm`. With one optimiser step it is what the update clips and
    steps by. Every denominator is that of all trajectories, so that parts add up to the whole.

    Args:
        model: the policy that is updated, a Hugging Face causal LM.
        reference: reference policy, where the loss has a KL term.
        trajectories: those of the update; of weight 0 or without a sampled token they take no part, as in the update.
        settings: of the update.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        trajectories: Sequence[TrainingTrajectory],
        settings: UpdateSettings,
    ) -> None:
        taking_part = sorted(
            (one for one in trajectories if one.weight > 0 and one.loss_mask.any()), key=lambda one: one.trajectory_id
        )
        self._model = model
        self._reference = reference
        self._gradients = Gradients(model, reference, taking_part, settings)
        self._denominators = self._gradients.denominators(range(len(taking_part)))
        self._place = {one.trajectory_id: index for index, one in enumerate(taking_part)}

    @property
    def has_signal(self) -> bool:
        """Some advantage is not 0: else the update takes no step."""
        return any(one.advantage for one in self._gradients.trajectories)

    def whole(self) -> Gradient:
        """Of all trajectories."""
        return self._of(range(len(self._place)))

    def part(self, trajectory_id: str) -> Gradient:
        """Of one trajectory, zeros if it takes no part."""
        place = self._place.get(trajectory_id)
        return self._of([] if place is None else [place])

    def _of(self, places: Sequence[int]) -> Gradient:
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._model.zero_grad(set_to_none=True)
        with dropout_off(self._model), dropout_off(self._reference or nn.Identity()):
            for segments in self._gradients.plan(places).micro_batches:
                torch.autograd.backward(self._gradients.loss(segments, self._denominators).total)
        found = [
            torch.zeros_like(one, device="cpu") if one.grad is None else one.grad.detach().cpu() for one in parameters
        ]
        self._model.zero_grad(set_to_none=True)
        return found


def gradient_share(part: Gradient, whole: Gradient) -> GradientShare:
    """Compare one trajectory's gradient with that of all."""
    size = gradient_norm(whole)
    share = gradient_dot(part, whole) / size**2 if size else None
    return GradientShare(gradient_norm(part), gradient_cosine(part, whole), share)


def gradient_norm(gradient: Gradient) -> float:
    """L2 norm, summed in float64."""
    return gradient_dot(gradient, gradient) ** 0.5


def gradient_dot(one: Gradient, other: Gradient) -> float:
    """Inner product, summed in float64."""
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def gradient_cosine(one: Gradient, other: Gradient) -> float | None:
    """None where one of them is 0."""
    sizes = gradient_norm(one), gradient_norm(other)
    return gradient_dot(one, other) / (sizes[0] * sizes[1]) if all(sizes) else None
