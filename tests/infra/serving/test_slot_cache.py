import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from infra.serving.slot_cache import SlotCache

SLOTS, POSITIONS, HEADS, GROUPS, DIM = 9, 24, 2, 3, 8
CONFIG = Qwen3Config(
    num_hidden_layers=2, num_key_value_heads=HEADS, num_attention_heads=HEADS * GROUPS, head_dim=DIM, hidden_size=8
)


def filled_cache() -> SlotCache:
    cache = SlotCache(CONFIG, SLOTS, POSITIONS, torch.float32)
    torch.manual_seed(0)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def plain_attention(cache: SlotCache, layer: int, query: torch.Tensor, slot: int, position: int) -> torch.Tensor:
    """One query, one head at a time, over what its slot holds up to its own position."""
    out = torch.empty_like(query)
    for head in range(HEADS * GROUPS):
        keys = cache.keys[layer, slot, : position + 1, head // GROUPS]
        values = cache.values[layer, slot, : position + 1, head // GROUPS]
        weights = torch.softmax(keys @ query[head] * 0.3, dim=0)
        out[head] = weights @ values
    return out


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 11), st.integers(1, 12)),
        min_size=1,
        unique_by=lambda row: row[0],
    )
)
def test_packed_attention_equals_a_plain_loop(rows: list[tuple[int, int, int]]) -> None:
    rows.sort(key=lambda row: row[2])
    row_P, start_P, feed_P = (np.array(column) for column in zip(*rows, strict=True))
    cache = filled_cache()
    plan = cache.plan(row_P, start_P, feed_P)
    query = torch.randn(int(feed_P.sum()), HEADS * GROUPS, DIM)
    out = torch.cat([cache.attend(1, query[s.flat], s, 0.3) for s in plan.segments])
    at = 0
    for slot, start, feed in rows:
        for position in range(start, start + feed):
            assert int(plan.where[at]) == slot * POSITIONS + position
            torch.testing.assert_close(
                out[at], plain_attention(cache, 1, query[at], slot, position), atol=1e-5, rtol=1e-5
            )
            at += 1
    assert at == len(out)


def test_one_token_rows_far_apart_are_gathered_and_close_ones_viewed() -> None:
    cache = SlotCache(CONFIG, 40, POSITIONS, torch.float32)
    one = np.ones(3, dtype=np.int64)
    (far,) = cache.plan(np.array([0, 20, 39]), one, one).segments
    (near,) = cache.plan(np.array([4, 2, 8]), one, one).segments
    assert isinstance(far.rows, torch.Tensor)
    assert near.rows == slice(2, 9)


def test_a_copied_prefix_is_equal_and_ends_where_it_should() -> None:
    cache = filled_cache()
    before = cache.keys[:, 5].clone()
    cache.copy_prefix(2, 5, 7)
    assert torch.equal(cache.keys[:, 5, :7], cache.keys[:, 2, :7])
    assert torch.equal(cache.values[:, 5, :7], cache.values[:, 2, :7])
    assert torch.equal(cache.keys[:, 5, 7:], before[:, 7:])


def test_only_the_same_geometry_fits() -> None:
    cache = SlotCache(CONFIG, SLOTS, POSITIONS, torch.float32)
    assert cache.fits(CONFIG, torch.float32)
    assert not cache.fits(CONFIG, torch.bfloat16)
    deeper = Qwen3Config(
        num_hidden_layers=3, num_key_value_heads=HEADS, num_attention_heads=HEADS * GROUPS, head_dim=DIM, hidden_size=8
    )
    assert not cache.fits(deeper, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slots_size_is_what_is_allocated(dtype: torch.dtype) -> None:
    cache = SlotCache(CONFIG, SLOTS, POSITIONS, dtype)
    allocated = cache.keys.nbytes + cache.values.nbytes
    assert SLOTS * SlotCache.bytes_per_slot(CONFIG, POSITIONS, dtype) == allocated
    assert not cache.keys.any()
