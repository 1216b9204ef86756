import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mgrpo_core.errors import ConfigError
from mgrpo_core.student_t import two_sided_quantile


def test_one_degree_of_freedom_is_the_cauchy_distribution() -> None:
    # quartiles of the Cauchy distribution: tan(pi / 4) = 1
    assert two_sided_quantile(0.5, 1) == pytest.approx(1.0, rel=1e-12)


def test_two_degrees_of_freedom_have_a_closed_form() -> None:
    # P(|T| < t) = t / sqrt(2 + t^2) = 0.95  ->  t = 0.95 sqrt(2 / (1 - 0.9025)) = 4.302653
    assert two_sided_quantile(0.95, 2) == pytest.approx(0.95 * math.sqrt(2 / 0.0975), rel=1e-12)


@given(st.floats(0.01, 0.999), st.integers(1, 500))
def test_agrees_with_scipy(confidence: float, freedom: int) -> None:
    wanted = stats.t.ppf((1 + confidence) / 2, freedom)
    # scipy's own inverse is good to about 1e-10
    assert two_sided_quantile(confidence, freedom) == pytest.approx(wanted, rel=1e-8)


def test_many_degrees_of_freedom_are_the_normal_distribution() -> None:
    # the normal's 0.975 quantile, which t exceeds by 1.3e-5 at 100,000
    assert two_sided_quantile(0.95, 10_000_000) == pytest.approx(1.959964, abs=1e-4)


def test_no_degree_of_freedom_has_no_finite_quantile() -> None:
    assert two_sided_quantile(0.95, 0) == math.inf


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3), (1.0, 3), (95, 3), (math.nan, 3), (0.95, -1)])
def test_what_is_no_probability_is_refused(confidence: float, freedom: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        two_sided_quantile(confidence, freedom)
