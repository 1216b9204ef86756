import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.data_order import DataCursor, next_batch
from mgrpo_core.errors import ShapeError


def batches(
    cursor: DataCursor, count: int, queries: int, batch: int, seed: int
) -> tuple[list[tuple[int, ...]], DataCursor]:
    drawn = []
    for _ in range(count):
        step = next_batch(cursor, queries, batch, seed)
        drawn.append(step.index_Q)
        cursor = step.after
    return drawn, cursor


def test_a_resumed_run_draws_what_the_straight_run_draws():  # case H1: 10 prompts, seed 7, batch 2, stop after 2
    straight, _ = batches(DataCursor(), 5, 10, 2, 7)
    first, cursor = batches(DataCursor(), 2, 10, 2, 7)
    rest, _ = batches(cursor, 3, 10, 2, 7)
    assert first + rest == straight
    assert sorted(index for batch in straight for index in batch) == list(range(10))


def test_a_stop_exactly_at_the_end_of_an_epoch_goes_on_with_the_next():  # case H1
    straight, _ = batches(DataCursor(), 7, 10, 2, 7)
    first, cursor = batches(DataCursor(), 5, 10, 2, 7)
    rest, _ = batches(cursor, 2, 10, 2, 7)
    assert first + rest == straight
    assert cursor == DataCursor(0, 10)
    assert straight[5:] != straight[:2]  # another permutation


@given(queries=st.integers(1, 40), batch=st.integers(1, 40), seed=st.integers(0, 2**62), epochs=st.integers(1, 3))
def test_every_query_comes_once_an_epoch_and_no_batch_holds_one_twice(queries, batch, seed, epochs):
    batch = min(batch, queries)
    cursor, seen = DataCursor(), [[] for _ in range(epochs)]
    while cursor != DataCursor(epochs - 1, queries):
        step = next_batch(cursor, queries, batch, seed)
        assert 1 <= len(step.index_Q) <= batch
        seen[step.epoch].extend(step.index_Q)
        cursor = step.after
    assert [sorted(order) for order in seen] == [list(range(queries))] * epochs


def test_without_shuffling_the_order_is_the_dataset_s():
    assert next_batch(DataCursor(3, 2), 5, 2, 0, shuffle=False).index_Q == (2, 3)


def test_a_batch_larger_than_the_dataset_is_refused_with_the_setting_to_change():
    with pytest.raises(ShapeError, match=r"queries_per_iteration: 4 cannot be filled from a dataset of 3"):
        next_batch(DataCursor(), 3, 4, 0)
