import math
import pickle

import numpy as np
import pytest

from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import Component, ScoreStatus, absent, component_of, scored


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (True, 1.0),
        (False, 0.0),
        (1, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.bool_(True), 1.0),
        (np.int8(3), 3.0),
    ],
)
def test_numbers_and_bools_are_scores_in_wide_floats(returned, value):
    # case A4: the type that a grader returns decides no statistic
    component = component_of(returned, "f")
    assert component == scored(value)
    assert type(component.value) is float


def test_none_is_absent_and_not_zero():
    # case A7
    assert component_of(None, "f") == absent("f returned None")


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_no_finite_number_has_failed(returned):
    # case A5
    component = component_of(returned, "f")
    assert (component.status, component.value) == (ScoreStatus.FAILED, None)
    assert component.reason.startswith("f returned ")


@pytest.mark.parametrize("returned", ["0.5", "Correct", [1.0], {"score": 1}, 1j, np.array([1.0])])
def test_text_and_containers_are_errors_that_name_the_grader(returned):
    # case A5: non-numeric judge text
    with pytest.raises(ConfigError, match=r"my:grader: returned .*expected a number"):
        component_of(returned, "my:grader")


@pytest.mark.parametrize(
    ("value", "status"), [(0, "scored"), (1, "scored"), (1.01, "failed"), (-0.01, "failed"), (8, "failed")]
)
def test_a_grader_that_promises_the_unit_interval_is_held_to_it(value, status):
    assert component_of(value, "judge", unit_interval=True).status == status


@pytest.mark.parametrize(
    ("status", "value"),
    [
        (ScoreStatus.SCORED, None),
        (ScoreStatus.SCORED, math.nan),
        (ScoreStatus.FAILED, 0.0),
        (ScoreStatus.ABSENT, math.nan),
    ],
)
def test_no_component_is_both_a_number_and_missing(status, value):
    with pytest.raises(ConfigError, match="expected a finite value if scored"):
        Component(status, value)


def test_a_component_survives_pickling():
    assert pickle.loads(pickle.dumps(absent("x"))) == absent("x")
