"""Quantiles of Student's t, for intervals whose standard error is itself estimated from few questions."""

import math

import numpy as np

from mgrpo_core.errors import ConfigError

_NORMAL_FROM = 100_000  # the normal's quantile is the same to 1e-4 there
_HALVINGS = 60


def two_sided_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """The t that |T| stays below with probability `confidence`; infinite at 0 degrees of freedom.

    By bisection on the angle of the closed form of integer degrees of freedom: 1e-12 relative.

    Args:
        confidence: in (0, 1), as in 0.95.
        degrees_of_freedom: 0 or more.
    Raises: ConfigError for a confidence outside (0, 1) or negative degrees of freedom.
    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: {confidence}, expected a number between 0 and 1, as in 0.95.")
    if degrees_of_freedom < 0:
        raise ConfigError(f"degrees_of_freedom: {degrees_of_freedom}, expected 0 or more.")
    if degrees_of_freedom == 0:
        return math.inf
    freedom = min(degrees_of_freedom, _NORMAL_FROM)
    coefficients = _coefficients(freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        if _probability_within(angle, freedom, coefficients) < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _coefficients(freedom: int) -> np.ndarray:
    """Of the powers of the cosine: 1, 2/3, 2*4/(3*5), … for odd freedom, 1, 1/2, 1*3/(2*4), … for even."""
    terms = (freedom - 1) // 2 if freedom % 2 else freedom // 2
    upper = np.arange(1, terms) * 2 - (0 if freedom % 2 else 1)
    return np.cumprod(np.concatenate([np.ones(min(terms, 1)), upper / (upper + 1)]))


def _probability_within(angle: float, freedom: int, coefficients: np.ndarray) -> float:
    cosine, sine = math.cos(angle), math.sin(angle)
    series = float(coefficients @ cosine ** (2.0 * np.arange(len(coefficients))))
    if freedom % 2:
        return 2 / math.pi * (angle + sine * cosine * series)
    return sine * series
