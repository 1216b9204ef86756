"""The one place where a number becomes one that JSON has."""

import math


def finite_or_none(value: float | None) -> float | None:
    """The value as a plain float; None for NaN, infinity and None.

    Prefect stores NaN as null but infinity as the bare word Infinity, which no JSON reader takes. Seen on 3.9.1.
    """
    return float(value) if value is not None and math.isfinite(value) else None
