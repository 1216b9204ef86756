import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_core.errors import ConfigError, ShapeError
from mgrpo_core.update.loss import Denominators, policy_loss
from mgrpo_core.update.loss_settings import ClipRange, Correction, KLPenalty, LossSettings
from tests.mgrpo_core.update.loss_batches import Leaves, denominators_of, loss_over, micro_batch, sampled
from tests.oracles import LoopTrajectory, loss_by_loop

REDUCTIONS = [
    LossSettings(),
    LossSettings(reduction="token_mean"),
    LossSettings(reduction="constant", constant_length=16),
]

logprob = st.floats(-6, -0.01)
trajectory = st.integers(1, 5).flatmap(
    lambda n: st.builds(
        LoopTrajectory,
        new=st.lists(logprob, min_size=n, max_size=n),
        old=st.lists(logprob, min_size=n, max_size=n),
        sampler=st.lists(st.one_of(logprob, st.just(math.nan)), min_size=n, max_size=n),
        ref=st.lists(logprob, min_size=n, max_size=n),
        entropy=st.lists(st.floats(0, 3), min_size=n, max_size=n),
        advantage=st.sampled_from([-1.5, -0.3, 0.0, 0.7, 2.0]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
)
loss_settings = st.builds(
    LossSettings,
    ratio=st.sampled_from(["token", "sequence"]),
    clip=st.sampled_from([ClipRange(), ClipRange(0.2, 0.2), ClipRange(dual=3.0)]),
    kl=st.builds(KLPenalty, st.sampled_from([0.0, 0.1]), st.sampled_from(["k1", "k2", "k3", "k3_ratio"])),
    correction=st.builds(
        Correction, st.sampled_from(["none", "truncate", "mask"]), st.sampled_from(["token", "sequence"])
    ),
    entropy_bonus=st.sampled_from([0.0, 0.01]),
).flatmap(
    lambda base: st.sampled_from(
        [
            base,
            LossSettings(base.ratio, base.clip, "token_mean", None, base.kl, base.correction, base.entropy_bonus),
            LossSettings(base.ratio, base.clip, "constant", 16, base.kl, base.correction, base.entropy_bonus),
        ]
    )
)


def by_loop(trajectories, chosen: LossSettings) -> float:
    return loss_by_loop(
        trajectories,
        ratio=chosen.ratio,
        low=chosen.clip.low,
        high=chosen.clip.high,
        dual=chosen.clip.dual,
        reduction=chosen.reduction,
        constant_length=chosen.constant_length,
        kl_coefficient=chosen.kl.coefficient,
        kl_estimator=chosen.kl.estimator,
        correction=chosen.correction.mode,
        correction_level=chosen.correction.level,
        cap=chosen.correction.cap,
        entropy_bonus=chosen.entropy_bonus,
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(trajectory, min_size=1, max_size=4), loss_settings)
def test_loss_equals_a_loop_over_trajectories_and_tokens(trajectories, chosen):
    total, _, _ = loss_over(trajectories, chosen, gaps=1, padding=2, junk=math.nan)
    assert total == pytest.approx(by_loop(trajectories, chosen), rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(trajectory, min_size=2, max_size=5), loss_settings, st.randoms(use_true_random=False), st.integers(1, 4)
)
def test_any_split_order_and_padding_gives_the_same_loss_and_gradient(trajectories, chosen, random, parts):  # case B1
    order = list(range(len(trajectories)))
    random.shuffle(order)
    split = [order[part::parts] for part in range(parts) if order[part::parts]]
    whole, whole_gradients, _ = loss_over(trajectories, chosen)
    total, gradients, _ = loss_over(trajectories, chosen, split=split, padding=3, gaps=2, junk=-7.0)
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-12)
    for own, expected in zip(gradients, whole_gradients, strict=True):
        assert own == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        # token losses 0.5 x 4, 2.0 x 2, 0.1 x 10, sum 7
        (REDUCTIONS[0], (0.5 + 2.0 + 0.1) / 3),  # 0.866667
        (REDUCTIONS[1], 7 / 16),  # 0.4375
        (REDUCTIONS[2], 7 / 16 / 3),  # 0.145833
    ],
)
@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0, 1], [2]], [[2], [1], [0]]])
def test_micro_batches_share_the_denominators_of_the_batch(chosen, expected, split):  # case B1
    trajectories = [
        sampled([-1.0] * 4, advantage=-0.5),  # at ratio 1 the loss of a token is -A
        sampled([-1.0] * 2, advantage=-2.0),
        sampled([-1.0] * 10, advantage=-0.1),
    ]
    total, _, _ = loss_over(trajectories, chosen, split=split)
    assert total == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("junk", [-110.0, 0.0, math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_junk_in_masked_places_changes_no_bit(junk, dtype, ratio):  # case B2
    trajectories = [sampled([-1.0, -2.0], old=[-1.1, -1.9], sampler=[-1.0, -2.2], ref=[-0.9, -2.1])]
    chosen = LossSettings(ratio=ratio, kl=KLPenalty(0.1), correction=Correction("truncate"), entropy_bonus=0.01)
    clean = loss_over(trajectories, chosen, dtype=dtype, gaps=1, junk=-1.0)
    dirty = loss_over(trajectories, chosen, dtype=dtype, gaps=1, junk=junk)
    assert dirty[:2] == clean[:2]
    assert torch.equal(dirty[2].sums, clean[2].sums)


def test_a_stale_masked_token_leaves_a_loss_of_minus_1():  # case B2
    leaf = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    batch = replace(
        micro_batch([sampled([-1.0])], Leaves.of([sampled([-1.0])], torch.float32), [0], gaps=1),
        logprobs_BT=leaf,
        entropy_BT=torch.zeros(1, 2),
        old_logprobs_BT=torch.tensor([[-110.0, -1.0]]),
        sampler_logprobs_BT=torch.tensor([[-110.0, -1.0]]),
        ref_logprobs_BT=None,
        mask_BT=torch.tensor([[False, True]]),
    )
    loss = policy_loss(batch, Denominators(1.0, 1.0), LossSettings())
    loss.total.backward()
    assert loss.total.item() == -1.0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("gap", [109.0, -109.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_on_a_sampled_token_stays_finite(gap, advantage):  # case B2: exp overflows above 88.72
    trajectories = [sampled([-1.0], old=[-1.0 - gap], sampler=[-500.0], ref=[-300.0], advantage=advantage)]
    chosen = LossSettings(kl=KLPenalty(0.1, "k3"), correction=Correction("truncate"))
    total, gradients, sums = loss_over(trajectories, chosen, dtype=torch.float32)
    assert math.isfinite(total)
    assert all(math.isfinite(value) for leaf in gradients for value in leaf)
    assert torch.isfinite(sums.sums).all()


def test_tool_output_has_neither_loss_nor_gradient():  # case B18
    # 3 sampled tokens of loss 1, 5 tool tokens, 1 sampled token of loss 1: 4 / 4 = 1
    logprobs = torch.full((1, 9), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 3 + [False] * 5 + [True]])
    base = micro_batch([sampled([-1.0] * 4, advantage=-1.0)], Leaves.of([sampled([-1.0] * 4)]), [0])
    batch = replace(
        base,
        logprobs_BT=logprobs,
        entropy_BT=torch.where(mask, 1.0, 50.0),
        old_logprobs_BT=None,
        sampler_logprobs_BT=torch.full((1, 9), -1.0, dtype=torch.float64),
        ref_logprobs_BT=None,
        mask_BT=mask,
    )
    loss = policy_loss(batch, Denominators(1.0, 4.0), LossSettings())
    loss.total.backward()
    assert loss.total.item() == pytest.approx(1.0, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad[~mask].tolist() == [0.0] * 5
    assert logprobs.grad[mask].tolist() == pytest.approx([0.25] * 4)


def test_what_takes_no_part_is_in_no_denominator():  # case B13
    # 36 tokens whose losses sum to 9; a truncated trajectory of 12 takes no part: 9 / 36, not 9 / 48
    trajectories = [sampled([-1.0] * 36, advantage=-0.25)]
    assert loss_over(trajectories, LossSettings(reduction="token_mean"))[0] == pytest.approx(0.25, abs=1e-12)


def test_zero_loss_at_ratio_1_is_no_zero_gradient():  # case B15
    # A = 0.866 over 2 tokens and -0.866 over 6: trajectory mean 0, token mean (-2 + 6) * 0.866 / 8 = 0.433
    a = math.sqrt(3) / 2
    trajectories = [sampled([-0.7, -3.3], advantage=a), sampled([-1.0] * 6, advantage=-a)]
    total, gradients, _ = loss_over(trajectories, LossSettings())
    assert total == pytest.approx(0, abs=1e-12)
    assert gradients[0] == pytest.approx([-a / 4] * 2)  # -A / (2 tokens * 2 trajectories)
    assert gradients[1] == pytest.approx([a / 12] * 6)
    token_mean = loss_over(trajectories, LossSettings(reduction="token_mean"))[0]
    assert token_mean == pytest.approx(0.4330, abs=1e-4)


@pytest.mark.parametrize("chosen", [*REDUCTIONS, LossSettings(ratio="sequence", kl=KLPenalty(0.1))])
def test_a_weight_counts_like_literal_copies(chosen):  # case D3
    base = [
        sampled([-1.0, -2.0], old=[-1.2, -1.7], ref=[-1.1, -2.2], advantage=1.2),
        sampled([-0.5], old=[-0.9], ref=[-0.4], advantage=-0.4),
    ]
    weighted = [replace(base[0], weight=3.0), base[1]]
    literal = [base[0]] * 3 + [base[1]]
    one, own, one_sums = loss_over(weighted, chosen)
    many, copies, many_sums = loss_over(literal, chosen)
    assert one == pytest.approx(many, abs=1e-12)
    assert own[0] == pytest.approx([sum(grads) for grads in zip(*copies[:3], strict=True)], abs=1e-12)
    assert own[1] == pytest.approx(copies[3], abs=1e-12)
    torch.testing.assert_close(one_sums.sums[:14], many_sums.sums[:14])  # all but the unweighted counts


def test_a_padding_copy_of_weight_0_changes_no_gradient():  # case D3 (a)
    # gradients 1, 2, 6 and a filler: mean 3, not (1 + 2 + 6 + 1) / 4 = 2.5
    trajectories = [sampled([-1.0], advantage=-a, weight=w) for a, w in ((1, 1), (2, 1), (6, 1), (1, 0))]
    _, gradients, _ = loss_over(trajectories, LossSettings())
    assert sum(gradient[0] for gradient in gradients[:4]) == pytest.approx(3.0, abs=1e-12)


def test_sequence_ratio_by_hand():
    # log-ratios 0.3 and -0.1: mean 0.1, s = e^0.1 = 1.105171; loss -A s; d/dlogp_t = -A s / 2
    total, gradients, _ = loss_over(
        [sampled([-1.0, -2.0], old=[-1.3, -1.9], advantage=2.0)], LossSettings(ratio="sequence")
    )
    assert total == pytest.approx(-2 * math.exp(0.1), abs=1e-12)
    assert gradients[0] == pytest.approx([-math.exp(0.1)] * 2, abs=1e-12)


def test_a_clipped_sequence_has_gradient_exactly_0_at_every_token():
    # log-ratios 1.0 and -0.4: mean 0.3, s = 1.35 > 1.28, although one token's own ratio is below 1
    total, gradients, _ = loss_over([sampled([-1.0, -2.0], old=[-2.0, -1.6])], LossSettings(ratio="sequence"))
    assert total == pytest.approx(-1.28, abs=1e-12)
    assert gradients[0] == [0.0, 0.0]


@pytest.mark.parametrize("split_rows", [False, True])
def test_segments_of_a_trajectory_make_one_sequence_ratio(split_rows):
    trajectories = [
        sampled([-1.0, -2.0, -0.5], old=[-1.3, -1.9, -0.6], advantage=2.0),
        sampled([-1.0, -0.2], old=[-1.1, -0.3], advantage=-1.0),
    ]
    chosen = LossSettings(ratio="sequence", correction=Correction("truncate", "sequence"))
    total, _, _ = loss_over(trajectories, chosen, split_rows=split_rows)
    assert total == pytest.approx(by_loop(trajectories, chosen), abs=1e-12)


def test_half_a_trajectory_is_refused_where_a_sequence_ratio_needs_it_whole():
    trajectories = [sampled([-1.0, -2.0])]
    batch = micro_batch(trajectories, Leaves.of(trajectories), [0])
    batch.mask_BT[0, 1] = False
    with pytest.raises(ShapeError, match="1 of its 2 sampled tokens"):
        policy_loss(batch, denominators_of(trajectories), LossSettings(ratio="sequence"))


def test_a_kl_coefficient_without_reference_is_refused():
    trajectories = [sampled([-1.0])]
    batch = micro_batch(trajectories, Leaves.of(trajectories), [0], with_reference=False)
    with pytest.raises(ConfigError, match="no reference log-probs"):
        policy_loss(batch, denominators_of(trajectories), LossSettings(kl=KLPenalty(0.1)))


def test_entropy_bonus_pulls_entropy_up():
    # -0.02 * mean entropy; each of 2 tokens of 1 trajectory: -0.01
    total, gradients, _ = loss_over(
        [sampled([-1.0, -2.0], entropy=[1.0, 2.0], advantage=0.0)], LossSettings(entropy_bonus=0.02)
    )
    assert total == pytest.approx(-0.03, abs=1e-12)
    assert gradients[1] == pytest.approx([-0.01, -0.01], abs=1e-12)


@pytest.mark.parametrize(
    "chosen",
    [
        LossSettings(),
        LossSettings(ratio="sequence", reduction="token_mean"),
        LossSettings(clip=ClipRange(dual=3.0), kl=KLPenalty(0.3, "k3_ratio"), entropy_bonus=0.1),
        LossSettings(kl=KLPenalty(0.3, "k2"), correction=Correction("mask")),
        LossSettings(kl=KLPenalty(0.3, "k3"), correction=Correction("truncate", "sequence")),
    ],
)
def test_gradients_equal_finite_differences(chosen):
    trajectories = [
        sampled([-1.0, -2.0], old=[-1.1, -1.95], sampler=[-1.3, -3.0], ref=[-1.2, -1.8], advantage=1.3, weight=2.0),
        sampled([-0.5, -0.7], old=[-0.3, -2.4], sampler=[-0.4, math.nan], ref=[-0.4, -0.9], advantage=-0.8),
    ]
    denominators = denominators_of(trajectories)

    def total(*leaves: torch.Tensor) -> torch.Tensor:
        batch = micro_batch(trajectories, Leaves(list(leaves[:2]), list(leaves[2:])), [0, 1])
        return policy_loss(batch, denominators, chosen).total

    leaves = Leaves.of(trajectories)
    assert torch.autograd.gradcheck(total, (*leaves.new, *leaves.entropy))
