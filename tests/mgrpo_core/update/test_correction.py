import math

import pytest

from mgrpo_core.errors import ConfigError
from mgrpo_core.update.loss_settings import Correction, LossSettings
from mgrpo_core.update.metric_sums import metrics_of
from tests.mgrpo_core.update.loss_batches import loss_over, sampled

# old - sampler: weights 0.25, 1.5, 4
TRAJECTORY = sampled([-1.0] * 3, sampler=[-1.0 - math.log(w) for w in (0.25, 1.5, 4.0)])


def corrected(correction: Correction, trajectory=TRAJECTORY):
    total, gradients, sums = loss_over([trajectory], LossSettings(correction=correction))
    return total, gradients[0], metrics_of(sums)


def test_truncation_caps_the_weight_of_a_token():
    total, gradient, metrics = corrected(Correction("truncate", cap=2.0))
    assert gradient == pytest.approx([-0.25 / 3, -1.5 / 3, -2 / 3])  # -A w / 3 tokens
    assert total == pytest.approx(-(0.25 + 1.5 + 2) / 3)
    assert metrics.corrected_share == pytest.approx(1 / 3)
    assert metrics.correction_mean == pytest.approx(3.75 / 3)


def test_a_mask_drops_what_lies_outside_and_keeps_the_denominator():
    total, gradient, metrics = corrected(Correction("mask", cap=2.0))
    assert gradient == pytest.approx([0, -0.5, 0])
    assert total == pytest.approx(-0.5)
    assert metrics.corrected_share == pytest.approx(2 / 3)


def test_a_sequence_has_one_weight_the_geometric_mean():
    # (0.25 * 1.5 * 4) ^ (1/3) = 1.5 ^ (1/3) = 1.144714
    _, gradient, metrics = corrected(Correction("truncate", "sequence", cap=2.0))
    assert gradient == pytest.approx([-(1.5 ** (1 / 3)) / 3] * 3)
    assert metrics.corrected_share == 0


def test_no_correction_leaves_the_loss_alone_and_still_reports_the_gap():
    total, gradient, metrics = corrected(Correction())
    assert total == pytest.approx(-1)
    assert gradient == pytest.approx([-1 / 3] * 3)
    assert metrics.mismatch_mean == pytest.approx((math.log(4) + math.log(1.5) + math.log(4)) / 3)
    assert metrics.mismatch_max == pytest.approx(math.log(4))


def test_a_missing_sampler_logprob_is_not_corrected_and_counted():
    trajectory = sampled([-1.0, -1.0, -1.0], sampler=[math.nan, -math.inf, -1.0 - math.log(4.0)])
    total, _, metrics = corrected(Correction("truncate"), trajectory)
    assert total == pytest.approx(-(1 + 1 + 2) / 3)
    assert metrics.missing_sampler_tokens == 2
    assert metrics.mismatch_mean == pytest.approx(math.log(4))


def test_no_gradient_flows_through_the_weight():
    # d/dlogp of w(old - sampler) r(logp - old) is w r only
    trajectory = sampled([-1.0], old=[-1.1], sampler=[-1.4])
    _, gradient, _ = corrected(Correction("truncate"), trajectory)
    assert gradient == pytest.approx([-math.exp(0.3) * math.exp(0.1)])


def test_effective_sample_share_by_hand():
    # w = 0.25, 1.5, 4: 5.75^2 / (3 * (0.0625 + 2.25 + 16)) = 33.0625 / 54.9375
    assert corrected(Correction())[2].effective_sample_share == pytest.approx(33.0625 / 54.9375)


def test_effective_sample_share_is_1_where_sampler_and_policy_agree():
    assert corrected(Correction(), sampled([-1.0, -3.0]))[2].effective_sample_share == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("cap", [1.0, 0.5, math.nan])
def test_a_cap_that_is_no_cap_is_refused(cap):
    with pytest.raises(ConfigError, match="expected more than 1"):
        Correction("truncate", cap=cap)
