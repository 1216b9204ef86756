import pytest

from mgrpo_core.update.mismatch_growth import MismatchGrowth, mismatch_growth


@pytest.mark.parametrize(
    ("series", "growth"),
    [
        # earlier [.010 .012 .011] -> .011, newest [.016 .018 .017] -> .017 >= 1.5 x .011 = .0165
        ([0.010, 0.012, 0.011, 0.016, 0.018, 0.017], MismatchGrowth(0.011, 0.017)),
        # .016 < .0165
        ([0.010, 0.012, 0.011, 0.016, 0.018, 0.015], None),
        # one odd iteration moves no median
        ([0.010, 0.012, 0.011, 0.011, 0.900, 0.010], None),
        ([0.010, 0.012, 0.900, 0.011, 0.016, 0.012], None),
        # doubled, but a ratio is still off by less than 1 %
        ([0.001, 0.001, 0.001, 0.002, 0.002, 0.002], None),
        ([1e-6, 1e-6, 1e-6, 9e-6, 9e-6, 9e-6], None),
        # from nothing
        ([0.0, 0.0, 0.0, 0.01, 0.01, 0.01], MismatchGrowth(0.0, 0.01)),
        # two earlier figures are too few to tell, and what was not trained is no figure
        ([0.01, 0.01, 0.05, 0.05, 0.05], None),
        ([0.01, None, 0.01, 0.05, 0.05, 0.05], None),
        ([0.01, None, 0.01, 0.01, None, 0.05, 0.05, 0.05], MismatchGrowth(0.01, 0.05)),
        # high, and steady: a matter of dtype, not of growth
        ([0.2] * 13, None),
        ([], None),
    ],
)
def test_growth_is_told_by_medians(series: list[float | None], growth: MismatchGrowth | None) -> None:
    assert mismatch_growth(series) == growth


def test_only_the_last_thirteen_figures_count() -> None:
    # 0.05 was long ago: the ten before the newest three are [.01 x 10]
    assert mismatch_growth([0.05] * 20 + [0.01] * 10 + [0.02] * 3) == MismatchGrowth(0.01, 0.02)
    # a new level is the norm again once it fills most of the ten: five of .01 and five of .02 have the median .015
    assert mismatch_growth([0.01] * 5 + [0.02] * 8) is None
    assert mismatch_growth([0.01] * 6 + [0.02] * 7) == MismatchGrowth(0.01, 0.02)


def test_a_slow_growth_is_found_in_its_course() -> None:
    # 5 % an iteration: the medians lie 6.5 iterations apart, 1.05^6.5 = 1.37; 7 %: 1.07^6.5 = 1.55
    assert mismatch_growth([0.02 * 1.05**n for n in range(13)]) is None
    assert mismatch_growth([0.02 * 1.07**n for n in range(13)]) is not None
