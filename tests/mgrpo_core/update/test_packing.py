import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_core.errors import ShapeError
from mgrpo_core.update.packing import MAX_PADDING, Segment, pack, plan_micro_batches
from tests.mgrpo_core.update.small_policies import random_trajectories, trajectory


def of_lengths(lengths):
    return [trajectory(f"t{index:04d}", [1] * length, [0] * (length - 1) + [1]) for index, length in enumerate(lengths)]


def test_spread_out_lengths_are_padded_by_less_than_a_tenth():
    lengths = np.random.default_rng(0).integers(60, 401, 300)
    for budget in (512, 2048, 8192, 65536):
        plan = plan_micro_batches(of_lengths(lengths), budget)
        assert plan.tokens == lengths.sum()
        assert plan.computed_tokens == sum(len(batch) * batch[0].length for batch in plan.micro_batches)
        assert 0 <= plan.padding_share < 0.1
    # A budget of 2048 holds 5 of the longest: grouping by length must not cost more micro-batches than a sixth above
    # the fewest that could hold the tokens.
    plan = plan_micro_batches(of_lengths(lengths), 2048)
    assert len(plan.micro_batches) <= 7 / 6 * np.ceil(lengths.sum() / 2048)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 60), max_size=40), st.integers(60, 400))
def test_every_sequence_is_computed_once_within_budget_and_padding(lengths, budget):
    plan = plan_micro_batches(of_lengths(lengths), budget)
    seen = sorted(segment.trajectory for batch in plan.micro_batches for segment in batch)
    assert seen == list(range(len(lengths)))
    for batch in plan.micro_batches:
        computed = len(batch) * max(segment.length for segment in batch)
        assert computed <= budget
        assert 1 - sum(segment.length for segment in batch) / computed <= MAX_PADDING


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_plan_is_a_function_of_the_set_and_not_of_its_order(lengths, random):
    straight = of_lengths(lengths)
    shuffled = list(straight)
    random.shuffle(shuffled)

    def names(trajectories):
        plan = plan_micro_batches(trajectories, 60)
        return [[(trajectories[s.trajectory].trajectory_id, s.length) for s in batch] for batch in plan.micro_batches]

    assert names(shuffled) == names(straight)


def test_a_sequence_longer_than_the_budget_is_named():
    with pytest.raises(ShapeError, match=r"trajectory t0001: a sequence of 70 tokens .* at least 70"):
        plan_micro_batches(of_lengths([10, 70]), 64)


def test_segments_that_must_stay_together_and_do_not_fit_are_named():
    both = trajectory("both", [1] * 20, [0, 1] * 10, segment_starts=(0, 10))
    assert len(plan_micro_batches([both], 16).micro_batches) == 2
    with pytest.raises(ShapeError, match=r"trajectory both: its 2 segments .* at least 20"):
        plan_micro_batches([both], 16, keep_together=True)


def test_segments_become_sequences_cut_after_their_last_sampled_token():
    # contexts [0, 4), [4, 9), [9, 12): the second ends in an unsampled tail, the third samples nothing
    one = trajectory("one", range(12), [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0], segment_starts=(0, 4, 9))
    plan = plan_micro_batches([one], 100)
    assert plan.micro_batches == ((Segment(0, 0, 4), Segment(0, 4, 7)),) or plan.micro_batches == (
        (Segment(0, 0, 4),),
        (Segment(0, 4, 7),),
    )
    assert plan.tokens == 7


def test_keep_together_puts_all_segments_of_a_trajectory_in_one_micro_batch():
    trajectories = random_trajectories(12, segments=True)
    plan = plan_micro_batches(trajectories, 60, keep_together=True)
    places = [{segment.trajectory for segment in batch} for batch in plan.micro_batches]
    assert sum(len(place) for place in places) == len(set().union(*places)) == 12


def test_nothing_to_pack_is_an_empty_plan():  # case D1
    plan = plan_micro_batches([], 16)
    assert (plan.micro_batches, plan.tokens, plan.padding_share) == ((), 0, 0.0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_follows_from_lengths_and_not_from_token_values(side):  # case B7
    # pad id = stop id = 2, which also occurs in the prompt; both end in a sampled stop token
    long = trajectory("long", [2, 9, 2, 5, 6, 2], [0, 0, 0, 1, 1, 1])
    short = trajectory("short", [7, 5, 2], [0, 1, 1])
    packed = pack([long, short], [Segment(0, 0, 6), Segment(1, 0, 3)], side=side, pad_token_id=2)
    pad, real = [2] * 3, [7, 5, 2]

    def row(values, filler):
        return [*filler, *values] if side == "left" else [*values, *filler]

    assert packed.token_ids_BT.tolist() == [[2, 9, 2, 5, 6, 2], row(real, pad)]
    assert packed.attention_mask_BT.tolist() == [[True] * 6, row([True] * 3, [False] * 3)]
    assert packed.loss_mask_BT.tolist() == [[False] * 3 + [True] * 3, row([False, True, True], [False] * 3)]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 5], row([0, 1, 2], [0] * 3)]


def test_positions_of_a_segment_start_at_0():
    one = trajectory("one", range(10, 20), [0, 1] * 5, segment_starts=(0, 4))
    packed = pack([one], [Segment(0, 4, 10)])
    assert packed.token_ids_BT.tolist() == [[14, 15, 16, 17, 18, 19]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_rows_know_their_trajectory_temperature_and_sampler_logprobs():
    two = trajectory("two", [1, 2, 3], [0, 1, 1], temperature=0.7, sampler=[np.nan, -1.5, -2.5])
    greedy = trajectory("greedy", [1, 2], [0, 1], temperature=0.0)
    packed = pack([greedy, two], [Segment(1, 0, 3), Segment(0, 0, 2)])
    assert packed.trajectories == (0, 1)
    assert packed.trajectory_B.tolist() == [1, 0]
    assert packed.temperature_B.tolist() == [0.7, 1.0]  # greedy is scored at 1
    assert packed.sampler_logprobs_BT[0, 1:].tolist() == [-1.5, -2.5]
    assert torch.isnan(packed.sampler_logprobs_BT[1]).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_values_laid_out_come_back_to_their_trajectories(side):
    trajectories = random_trajectories(5, segments=True)
    values = {index: np.arange(len(t.token_ids)) + 100.0 * index for index, t in enumerate(trajectories)}
    back = {index: np.full(len(t.token_ids), np.nan) for index, t in enumerate(trajectories)}
    for segments in plan_micro_batches(trajectories, 60).micro_batches:
        packed = pack(trajectories, segments, side=side)
        laid_out = packed.lay_out(values)
        expected = torch.isnan(laid_out) == ~packed.attention_mask_BT
        assert expected.all()
        packed.take_back(laid_out, back)
    for index, t in enumerate(trajectories):
        assert back[index][t.loss_mask].tolist() == values[index][t.loss_mask].tolist()
