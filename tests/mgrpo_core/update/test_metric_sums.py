import math

import pytest
import torch

from mgrpo_core.errors import ConfigError
from mgrpo_core.update.loss_settings import KLPenalty, LossSettings
from mgrpo_core.update.metric_sums import LossMetrics, MetricSums, metrics_of
from tests.mgrpo_core.update.loss_batches import loss_over, sampled

TRAJECTORIES = [
    sampled([-1.0, -2.0], old=[-1.5, -2.0], ref=[-1.2, -2.2], entropy=[1.0, 2.0], weight=3.0),
    sampled([-0.5], old=[-0.4], ref=[-0.6], entropy=[0.5], advantage=-1.0),
]


def test_means_are_over_sampled_tokens_with_their_multiplicity():
    metrics = metrics_of(loss_over(TRAJECTORIES, LossSettings(kl=KLPenalty(0.0, "k1")), gaps=1, junk=math.nan)[2])
    # 3 * 2 + 1 = 7 weighted tokens
    assert metrics.ratio_mean == pytest.approx((3 * (math.exp(0.5) + 1) + math.exp(-0.1)) / 7)
    assert metrics.ratio_max == pytest.approx(math.exp(0.5))
    assert metrics.entropy == pytest.approx((3 * 3.0 + 0.5) / 7)
    assert metrics.ref_kl == pytest.approx((3 * (0.2 + 0.2) + 0.1) / 7)
    # r - 1 - log r: e^0.5 - 1.5 and e^-0.1 - 0.9
    assert metrics.approx_kl == pytest.approx((3 * (math.exp(0.5) - 1.5) + math.exp(-0.1) - 0.9) / 7)
    assert metrics.clip_fraction_high == pytest.approx(3 / 7)
    assert metrics.tokens == 3


def test_metrics_do_not_depend_on_the_split():  # case B1
    whole = loss_over(TRAJECTORIES, LossSettings())[2]
    split = loss_over(TRAJECTORIES, LossSettings(), split=[[1], [0]], padding=4)[2]
    torch.testing.assert_close(split.sums, whole.sums)
    assert torch.equal(split.maxima, whole.maxima)


def test_equal_policies_have_ratio_1_and_no_kl():  # case B15
    metrics = metrics_of(loss_over([sampled([-0.6931472, -3.3, -7.77, -12.3456])], LossSettings())[2])
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.approx_kl) == (1.0, 1.0, 0.0)
    assert (metrics.clip_fraction_low, metrics.clip_fraction_high) == (0.0, 0.0)


def test_no_token_gives_zeros():
    assert metrics_of(MetricSums.zero(torch.device("cpu"))) == LossMetrics()


def test_a_constant_reduction_without_its_length_is_refused():
    with pytest.raises(ConfigError, match="constant_length None"):
        LossSettings(reduction="constant")


def test_a_length_with_another_reduction_is_refused():
    with pytest.raises(ConfigError, match="None with any other reduction"):
        LossSettings(constant_length=16)
