import math

import pytest
import torch

from mgrpo_core.errors import ConfigError
from mgrpo_core.update.loss import clipped_surrogate
from mgrpo_core.update.loss_settings import ClipRange, LossSettings
from mgrpo_core.update.metric_sums import metrics_of
from tests.mgrpo_core.update.loss_batches import loss_over, sampled

# advantage, ratio, loss with dual clip 3, loss without, bound that binds with dual clip
TABLE = [
    (1, 1.25, -1.25, -1.25, None),
    (1, 1.4, -1.28, -1.28, "high"),
    (1, 0.5, -0.5, -0.5, None),
    (-1, 0.75, 0.8, 0.8, "low"),
    (-1, 0.5, 0.8, 0.8, "low"),
    (-1, 1.5, 1.5, 1.5, None),
    (-1, 10, 3.0, 10.0, "dual"),
    (-2, 4, 6.0, 8.0, "dual"),
    (0, 5, 0.0, 0.0, None),
]


@pytest.mark.parametrize(("advantage", "ratio", "with_dual", "without", "bound"), TABLE)
def test_token_loss_is_that_of_the_clip_table(advantage, ratio, with_dual, without, bound):  # case B3
    for clip, expected in ((ClipRange(dual=3.0), with_dual), (ClipRange(), without)):
        loss = clipped_surrogate(torch.tensor(float(ratio)), torch.tensor(float(advantage)), clip)
        assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("advantage", "ratio", "with_dual", "without", "bound"), TABLE)
def test_gradient_is_exactly_0_past_a_binding_bound_and_minus_a_r_elsewhere(
    advantage, ratio, with_dual, without, bound
):  # case B3
    _, gradients, _ = loss_over(
        [sampled([-1.0], old=[-1.0 - math.log(ratio)], advantage=advantage)], LossSettings(clip=ClipRange(dual=3.0))
    )
    expected = 0.0 if bound else -advantage * ratio  # d(-A r)/dlogp = -A r
    assert gradients[0] == ([0.0] if bound else pytest.approx([expected], rel=1e-9))


def test_metrics_count_binding_bounds_only():  # case B3
    trajectories = [sampled([-1.0], old=[-1.0 - math.log(ratio)], advantage=a) for a, ratio, *_ in TABLE]
    metrics = metrics_of(loss_over(trajectories, LossSettings(clip=ClipRange(dual=3.0)))[2])
    assert metrics.clip_fraction_low == pytest.approx(2 / 9)
    assert metrics.clip_fraction_high == pytest.approx(1 / 9)
    assert metrics.clip_fraction_dual == pytest.approx(2 / 9)


def test_without_dual_clip_nothing_counts_as_dual():
    metrics = metrics_of(loss_over([sampled([-1.0], old=[-4.0], advantage=-1)], LossSettings())[2])
    assert metrics.clip_fraction_dual == 0


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0)])
def test_a_range_that_clips_everything_is_refused(low, high):
    with pytest.raises(ConfigError, match="expected 0 < low < 1"):
        ClipRange(low, high)


def test_a_dual_bound_inside_the_range_is_refused():
    with pytest.raises(ConfigError, match=r"dual 1\.1 is not above"):
        ClipRange(dual=1.1)
