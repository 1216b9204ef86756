"""Gradients of single trajectories, as parts of the whole."""

from dataclasses import replace

import pytest
import torch

from mgrpo_core.update.gradient_shares import LossGradient, gradient_norm, gradient_share
from mgrpo_core.update.loss_settings import Correction, KLPenalty, LossSettings
from mgrpo_core.update.policy_gradient import policy_gradient
from mgrpo_core.update.update_settings import UpdateSettings
from tests.mgrpo_core.update.small_policies import random_trajectories, small_policy

SETTINGS = {
    "as the paper": LossSettings(),
    "tokens alike, corrected": LossSettings(
        reduction="token_mean", correction=Correction("truncate", "token", 1.2), ratio="sequence"
    ),
    "with a pull to the reference": LossSettings(kl=KLPenalty(0.3), entropy_bonus=0.01),
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def loss(request) -> LossGradient:
    """Of 7 trajectories in float64, in micro-batches of a few."""
    return loss_of(request.param)


def loss_of(settings: LossSettings, **changes: dict[str, float]) -> LossGradient:
    model = small_policy(dtype=torch.float64)
    reference = small_policy(seed=1, dtype=torch.float64) if settings.kl.coefficient else None
    found = [
        replace(one, **changes.get(one.trajectory_id.replace("-", "_"), {}))
        for one in random_trajectories(7, segments=True)
    ]
    return LossGradient(model, reference, found, UpdateSettings(loss=settings, micro_batch_tokens=60))


IDS = [f"trajectory-{index:03d}" for index in range(7)]


def test_the_parts_add_up_to_the_whole(loss):
    whole, parts = loss.whole(), [loss.part(one) for one in IDS]
    for index, tensor in enumerate(whole):
        torch.testing.assert_close(sum(part[index] for part in parts), tensor, rtol=1e-10, atol=1e-13)
    assert gradient_norm(whole) > 0
    assert sum(gradient_share(part, whole).share for part in parts) == pytest.approx(1, abs=1e-10)


def test_the_whole_is_what_the_update_measures():
    loss = loss_of(LossSettings())
    model = small_policy(dtype=torch.float64)
    metrics = policy_gradient(
        model,
        random_trajectories(7, segments=True),
        torch.optim.SGD(model.parameters(), lr=0.0),
        UpdateSettings(micro_batch_tokens=60),
        rng=None,
    )
    assert gradient_norm(loss.whole()) == pytest.approx(metrics.grad_norm, rel=1e-12)


def test_weight_0_or_advantage_0_is_gradient_0():
    loss = loss_of(LossSettings(), trajectory_002={"advantage": 0.0}, trajectory_004={"weight": 0.0})
    for silent in (IDS[2], IDS[4], "no such trajectory"):
        found = gradient_share(loss.part(silent), loss.whole())
        assert (found.norm, found.cosine, found.share) == (0, None, 0)
    assert all(gradient_norm(loss.part(one)) > 0 for one in IDS if one not in (IDS[2], IDS[4]))


def test_with_a_kl_term_a_trajectory_of_advantage_0_still_pulls():
    loss = loss_of(SETTINGS["with a pull to the reference"], trajectory_002={"advantage": 0.0})
    assert gradient_norm(loss.part(IDS[2])) > 0


def test_a_part_is_its_trajectory_alone_over_the_denominators_of_all():
    """The loss over one trajectory alone has its own weight for a denominator: w_i / sum w apart."""
    settings = UpdateSettings(micro_batch_tokens=60)
    every = random_trajectories(7, segments=True)
    alone = LossGradient(small_policy(dtype=torch.float64), None, [every[3]], settings)
    factor = every[3].weight / sum(one.weight for one in every)
    found = gradient_norm(loss_of(LossSettings()).part(IDS[3]))
    # Qwen3's norms are float32 inside whatever the model is: another scale rounds otherwise
    assert found == pytest.approx(factor * gradient_norm(alone.whole()), rel=1e-6)


def test_of_a_gradient_of_0_nothing_is_a_share():
    loss = loss_of(LossSettings(), **{one.replace("-", "_"): {"advantage": 0.0} for one in IDS})
    assert not loss.has_signal
    found = gradient_share(loss.part(IDS[0]), loss.whole())
    assert (found.norm, found.cosine, found.share) == (0, None, None)


def test_the_models_own_gradients_are_left_as_none():
    model = small_policy(dtype=torch.float64)
    LossGradient(model, None, random_trajectories(2), UpdateSettings()).whole()
    assert all(parameter.grad is None for parameter in model.parameters())
