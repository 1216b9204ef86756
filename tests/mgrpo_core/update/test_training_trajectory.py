import math
import pickle

import pytest

from mgrpo_core.errors import NonFiniteError, ShapeError
from tests.mgrpo_core.update.small_policies import trajectory


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ShapeError, match=r"trajectory x: loss_mask has shape \(2,\), expected \[3\]"):
        trajectory("x", [1, 2, 3], [0, 1])


def test_no_token_is_refused():
    with pytest.raises(ShapeError, match="trajectory x: token_ids"):
        trajectory("x", [], [])


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 3), (0, 2, 1)])
def test_segment_starts_that_do_not_ascend_from_0_are_refused(starts):
    with pytest.raises(ShapeError, match="expected ascending offsets below 3"):
        trajectory("x", [1, 2, 3], [0, 0, 0], segment_starts=starts)


@pytest.mark.parametrize("mask", [[1, 0, 0, 0], [0, 0, 1, 0]])
def test_a_sampled_token_that_nothing_precedes_is_refused(mask):
    with pytest.raises(ShapeError, match="opens a segment and is marked as sampled"):
        trajectory("x", [1, 2, 3, 4], mask, segment_starts=(0, 2))


@pytest.mark.parametrize(("advantage", "weight"), [(math.nan, 1), (math.inf, 1), (1, math.nan), (1, -1)])
def test_an_advantage_or_weight_that_is_no_number_is_refused(advantage, weight):
    with pytest.raises(NonFiniteError, match="trajectory x") as caught:
        trajectory("x", [1, 2], [0, 1], advantage=advantage, weight=weight)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(NonFiniteError, match="temperature"):
        trajectory("x", [1, 2], [0, 1], temperature=temperature)
