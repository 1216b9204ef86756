import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.tracking.finite import finite_or_none


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, np.float32("inf"), np.float64("nan")])
def test_what_json_has_no_word_for_is_none(value: float | None) -> None:  # case G6
    assert finite_or_none(value) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_stays_itself(value: float) -> None:
    assert finite_or_none(value) == value


@given(st.floats())
def test_every_number_becomes_valid_json(value: float) -> None:
    json.dumps(finite_or_none(value), allow_nan=False)


def test_numbers_of_numpy_become_plain() -> None:
    assert type(finite_or_none(np.float64(0.5))) is float
