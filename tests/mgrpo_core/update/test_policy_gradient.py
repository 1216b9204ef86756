import math
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from mgrpo_core.errors import ConfigError, NonFiniteError, ShapeError
from mgrpo_core.update.loss_settings import ClipRange, Correction, KLPenalty, LossSettings
from mgrpo_core.update.policy_gradient import UpdateSettings, policy_gradient
from tests.mgrpo_core.update.small_policies import random_trajectories, small_policy, trajectory
from tests.oracles import LoopTrajectory, full_logits_logprobs, loss_by_loop


def adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)


def sgd(model, lr=1.0):
    """Steps along the gradient as it is, so that weights show it."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def update(model, trajectories, settings=None, optimizer=None, **others):
    return policy_gradient(
        model,
        trajectories,
        optimizer or adamw(model),
        settings or UpdateSettings(),
        rng=np.random.default_rng(7),
        **others,
    )


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def descent(trajectories, settings=None, *, dtype=torch.float64, **others) -> torch.Tensor:
    """The gradient that one update applied, from an SGD step of rate 1."""
    model = small_policy(dtype=dtype)
    before = weights(model)
    settings = replace(settings or UpdateSettings(), max_grad_norm=1e9)
    update(model, trajectories, settings, sgd(model), **others)
    return before - weights(model)


def assert_same_gradient(own: torch.Tensor, expected: torch.Tensor) -> None:
    # In units of the largest entry. Not tighter: Qwen3's norms round to float32 inside, whatever the model's dtype.
    torch.testing.assert_close(own / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-6)


def plain_gradient(trajectories) -> torch.Tensor:
    """d/dθ of mean_n w_n mean_t -A_n log pi(a_t) at ratio 1: REINFORCE with full logits, a segment at a time."""
    model = small_policy(dtype=torch.float64)
    total_weight = sum(one.weight for one in trajectories)
    loss = torch.zeros((), dtype=torch.float64)
    for one in trajectories:
        for start, stop in zip(one.segment_starts, (*one.segment_starts[1:], len(one.token_ids)), strict=True):
            chosen, _ = full_logits_logprobs(model, one.token_ids[start:stop].tolist(), one.scoring_temperature)
            mask = torch.from_numpy(one.loss_mask[start + 1 : stop])
            loss = loss - one.weight * one.advantage * chosen[mask].sum() / one.sampled_tokens / total_weight
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_step_applies_the_policy_gradient():
    trajectories = random_trajectories(7, segments=True)
    assert_same_gradient(descent(trajectories), plain_gradient(trajectories))


@pytest.mark.parametrize("budget", [24, 60, 4096])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reduction", ["trajectory_mean", "token_mean"])
def test_micro_batches_and_padding_leave_the_gradient_as_it_was(budget, side, reduction):  # case B1
    trajectories = random_trajectories(9, segments=True)
    loss = LossSettings(reduction=reduction)
    whole = descent(trajectories, UpdateSettings(loss=loss))
    split = descent(trajectories, UpdateSettings(loss=loss, micro_batch_tokens=budget, padding_side=side))
    assert_same_gradient(split, whole)


def test_the_order_of_the_trajectories_changes_no_bit():
    trajectories = random_trajectories(9)
    settings = UpdateSettings(micro_batch_tokens=60, optimizer_steps=2, epochs=2)
    one, other = small_policy(), small_policy()
    update(one, trajectories, settings)
    update(other, trajectories[::-1], settings)
    assert torch.equal(weights(one), weights(other))


def test_an_update_is_deterministic_bit_for_bit():
    settings = UpdateSettings(
        micro_batch_tokens=60, optimizer_steps=3, epochs=2, loss=LossSettings(kl=KLPenalty(0.1), entropy_bonus=0.01)
    )
    runs = []
    for _ in range(2):
        model = small_policy()
        optimizer = adamw(model)
        metrics = update(model, random_trajectories(9), settings, optimizer, reference=small_policy(5))
        moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
        runs.append((weights(model), moments, metrics))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[0][2] == runs[1][2]


def test_a_weight_trains_like_literal_copies():  # case D3
    base = random_trajectories(4)
    weighted = [replace(one, weight=float(2 + index % 2)) for index, one in enumerate(base)]
    literal = [
        replace(one, trajectory_id=f"{one.trajectory_id}-{copy}", weight=1.0)
        for index, one in enumerate(base)
        for copy in range(2 + index % 2)
    ]
    assert_same_gradient(descent(weighted), descent(literal))


def test_what_has_weight_0_or_no_sampled_token_is_never_computed():  # case B13, D2
    trajectories = random_trajectories(4)
    fillers = [
        replace(random_trajectories(1)[0], trajectory_id="dropped", weight=0.0, advantage=9.0),
        trajectory("silent", [1, 2, 3], [0, 0, 0], advantage=9.0),
        # would not fit any micro-batch if it were computed
        replace(random_trajectories(1, shortest=500, longest=500)[0], trajectory_id="long", weight=0.0),
    ]
    settings = UpdateSettings(micro_batch_tokens=120)
    one, other = small_policy(), small_policy()
    assert update(one, trajectories, settings) == update(other, trajectories + fillers, settings)
    assert torch.equal(weights(one), weights(other))


@pytest.mark.parametrize(
    "trajectories",
    [
        [],
        [replace(one, advantage=0.0) for one in random_trajectories(3)],
        [replace(one, weight=0.0) for one in random_trajectories(3)],
    ],
    ids=["empty", "advantages 0", "weights 0"],
)
def test_nothing_to_train_changes_nothing(trajectories):  # case D1, A1
    model = small_policy()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    update(model, random_trajectories(3), optimizer=optimizer, scheduler=scheduler)  # moments that could move it
    before, state = weights(model), pickle.dumps(optimizer.state_dict())
    metrics = update(model, trajectories, optimizer=optimizer, scheduler=scheduler)
    assert torch.equal(weights(model), before)
    assert pickle.dumps(optimizer.state_dict()) == state
    assert scheduler.last_epoch == 1
    assert (metrics.optimizer_steps, metrics.skipped_steps, metrics.loss, metrics.grad_norm) == (0, 1, 0.0, 0.0)
    assert metrics.lr == 0.5e-3


def test_first_step_has_ratio_exactly_1_over_several_micro_batches():  # case B15
    metrics = update(small_policy(), random_trajectories(9), UpdateSettings(micro_batch_tokens=60))
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.approx_kl) == (1.0, 1.0, 0.0)
    assert metrics.clip_fraction_low == metrics.clip_fraction_high == 0.0


def test_scores_taken_before_the_first_step_have_ratio_exactly_1_in_it():  # case B15
    # A learning rate of 0 leaves every step on the weights that were scored.
    model = small_policy()
    settings = UpdateSettings(micro_batch_tokens=60, optimizer_steps=3)
    metrics = update(model, random_trajectories(9), settings, adamw(model, lr=0.0))
    assert metrics.optimizer_steps == 3
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.approx_kl) == (1.0, 1.0, 0.0)


def test_dropout_and_training_mode_do_not_move_the_ratio():  # case B15
    model = small_policy(attention_dropout=0.5).train()
    still = small_policy(attention_dropout=0.5).eval()
    settings = UpdateSettings(optimizer_steps=2)
    assert update(model, random_trajectories(6), settings) == update(still, random_trajectories(6), settings)
    assert model.training


def test_later_steps_compare_with_the_policy_before_the_first():
    # Two epochs of one minibatch with SGD: the second step's loss, by hand from scores before and after the first.
    trajectories = random_trajectories(4)
    first, both = small_policy(dtype=torch.float64), small_policy(dtype=torch.float64)
    settings = UpdateSettings(max_grad_norm=1e9)
    update(first, trajectories, settings, sgd(first))
    before = small_policy(dtype=torch.float64)

    def sampled_logprobs(model, one):
        chosen, entropy = full_logits_logprobs(model, one.token_ids.tolist(), one.scoring_temperature)
        mask = torch.from_numpy(one.loss_mask[1:])
        return chosen[mask].tolist(), entropy[mask].tolist()

    with torch.no_grad():
        loops = []
        for one in trajectories:
            old, _ = sampled_logprobs(before, one)
            new, entropy = sampled_logprobs(first, one)
            loops.append(LoopTrajectory(new, old, old, old, entropy, one.advantage, one.weight))
    second_loss = loss_by_loop(loops)
    total_weight = sum(one.weight for one in trajectories)
    first_loss = -sum(one.weight * one.advantage for one in trajectories) / total_weight
    metrics = update(both, trajectories, replace(settings, epochs=2), sgd(both))
    assert metrics.loss == pytest.approx((first_loss + second_loss) / 2, rel=1e-9)


def test_sampler_logprobs_as_old_ones_give_their_ratio():
    model = small_policy(dtype=torch.float64)
    one = random_trajectories(1)[0]
    with torch.no_grad():
        chosen, _ = full_logits_logprobs(model, one.token_ids.tolist(), one.scoring_temperature)
    sampler = np.full(len(one.token_ids), np.nan)
    sampler[1:] = chosen.numpy() - 0.1  # ratio e^0.1, except where none was reported
    sampler[-1] = np.nan
    metrics = update(model, [replace(one, sampler_logprobs=sampler)], UpdateSettings(old_logprobs="sampler"))
    n = one.sampled_tokens
    assert metrics.ratio_mean == pytest.approx(((n - 1) * math.exp(0.1) + 1) / n, rel=1e-9)
    assert metrics.missing_sampler_tokens == 1
    # the mismatch is reported although there is nothing left to correct
    assert (metrics.mismatch_mean, metrics.mismatch_max) == (pytest.approx(0.1), pytest.approx(0.1))
    assert metrics.correction_mean == 1


def test_mismatch_and_correction_see_what_the_sampler_reported():
    model = small_policy(dtype=torch.float64)
    one = random_trajectories(1)[0]
    with torch.no_grad():
        chosen, _ = full_logits_logprobs(model, one.token_ids.tolist(), one.scoring_temperature)
    sampler = np.full(len(one.token_ids), np.nan)
    sampler[1:] = chosen.numpy() - math.log(3)
    settings = UpdateSettings(loss=LossSettings(correction=Correction("truncate", cap=2.0)))
    metrics = update(model, [replace(one, sampler_logprobs=sampler)], settings)
    assert metrics.mismatch_mean == pytest.approx(math.log(3), rel=1e-9)
    assert (metrics.correction_mean, metrics.corrected_share) == (pytest.approx(2.0), 1.0)
    assert metrics.loss == pytest.approx(-2.0 * one.advantage, rel=1e-9)


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_kl_pulls_towards_the_reference_and_is_reported(optimizer_steps):
    trajectories = [replace(one, advantage=one.advantage * 1e-9) for one in random_trajectories(6)]
    model, reference = small_policy(), small_policy(5)
    frozen = weights(reference)
    settings = UpdateSettings(optimizer_steps=optimizer_steps, loss=LossSettings(kl=KLPenalty(1.0, "k2")))
    optimizer = adamw(model, lr=3e-3)
    kls = [update(model, trajectories, settings, optimizer, reference=reference).ref_kl for _ in range(8)]
    assert kls[0] > 0.01
    assert kls[-1] < 0.5 * kls[0]
    assert torch.equal(weights(reference), frozen)


def test_a_kl_coefficient_without_a_reference_is_refused():
    with pytest.raises(ConfigError, match="no reference policy"):
        update(small_policy(), [], UpdateSettings(loss=LossSettings(kl=KLPenalty(0.1))))


def test_a_positive_advantage_makes_its_tokens_likelier_and_a_negative_one_rarer():
    good = trajectory("good", [1, 2, 3, 4, 5], [0, 0, 1, 1, 1], advantage=1.0)
    bad = trajectory("bad", [1, 2, 9, 8, 7], [0, 0, 1, 1, 1], advantage=-1.0)
    model = small_policy()

    def score(one):
        with torch.no_grad():
            return full_logits_logprobs(model, one.token_ids.tolist(), 1.0)[0][1:].sum().item()

    before = score(good), score(bad)
    update(model, [good, bad])
    assert score(good) > before[0]
    assert score(bad) < before[1]


def test_gradients_are_clipped_to_the_norm_and_reported_before():
    trajectories = random_trajectories(4)
    gradient = plain_gradient(trajectories)
    model = small_policy(dtype=torch.float64)
    before = weights(model)
    metrics = update(model, trajectories, UpdateSettings(max_grad_norm=0.01), sgd(model))
    # tied embeddings are one parameter, so the flat gradient has it once
    assert metrics.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    assert (before - weights(model)).norm().item() == pytest.approx(0.01, rel=1e-4)


def test_minibatches_take_one_step_each_and_the_scheduler_follows():
    model = small_policy()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    metrics = update(
        model, random_trajectories(9), UpdateSettings(optimizer_steps=3, epochs=2), optimizer, scheduler=scheduler
    )
    assert (metrics.optimizer_steps, metrics.skipped_steps) == (6, 0)
    assert scheduler.last_epoch == 6
    assert metrics.lr == pytest.approx(1e-3 * 0.5**5)
    assert metrics.tokens == 2 * sum(one.sampled_tokens for one in random_trajectories(9))


def test_more_minibatches_than_trajectories_skip_the_empty_ones():
    metrics = update(small_policy(), random_trajectories(2), UpdateSettings(optimizer_steps=5))
    assert (metrics.optimizer_steps, metrics.skipped_steps) == (2, 3)


def test_another_generator_makes_other_minibatches():
    settings = UpdateSettings(optimizer_steps=3)
    models = [small_policy(), small_policy()]
    for seed, model in enumerate(models):
        policy_gradient(model, random_trajectories(9), adamw(model), settings, rng=np.random.default_rng(seed))
    assert not torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(ratio="sequence"),
        LossSettings(correction=Correction("mask", "sequence")),
    ],
)
def test_sequence_level_numbers_keep_segments_together(loss):
    trajectories = random_trajectories(6, segments=True)
    whole = descent(trajectories, UpdateSettings(loss=loss))
    split = descent(trajectories, UpdateSettings(loss=loss, micro_batch_tokens=30))
    assert_same_gradient(split, whole)


def test_metrics_are_finite_numbers_and_say_what_was_computed():
    settings = UpdateSettings(
        optimizer_steps=2, loss=LossSettings(clip=ClipRange(dual=3.0), correction=Correction("truncate"))
    )
    metrics = update(small_policy(), random_trajectories(8, segments=True), settings, reference=small_policy(3))
    assert all(math.isfinite(value) for value in asdict(metrics).values())
    assert metrics.trajectories == 8
    assert metrics.weight == pytest.approx(sum(one.weight for one in random_trajectories(8)))
    assert metrics.tokens_computed > metrics.tokens
    assert 0 <= metrics.padding_share <= 0.1
    assert metrics.ref_kl > 0
    assert 0 < metrics.effective_sample_share < 1


def test_progress_counts_real_tokens_to_the_end():
    seen: list[tuple[int, int]] = []
    update(
        small_policy(),
        random_trajectories(9),
        UpdateSettings(micro_batch_tokens=60, epochs=2),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) > 4
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == {total for _, total in seen}.pop()


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_trajectory():  # case B2
    model = small_policy()
    with torch.no_grad():
        model.model.embed_tokens.weight[42] = torch.nan  # tied: the head's row 42 would spoil every softmax
    model.lm_head.weight = torch.nn.Parameter(small_policy().lm_head.weight.detach().clone())
    clean = [replace(one, token_ids=np.where(one.token_ids == 42, 41, one.token_ids)) for one in random_trajectories(5)]
    broken = trajectory("broken", [1, 42, 3], [0, 0, 1])
    optimizer = adamw(model)
    before = weights(model).nan_to_num(777.0)
    with pytest.raises(NonFiniteError, match="trajectory broken: its share of the loss") as caught:
        update(model, [*clean, broken], UpdateSettings(micro_batch_tokens=60), optimizer)
    assert torch.equal(weights(model).nan_to_num(777.0), before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NonFiniteError)
    assert update(model, clean, optimizer=optimizer).optimizer_steps == 1  # the others are fine


def test_a_gradient_that_is_not_finite_stops_before_the_step_and_names_the_trajectory():
    model = small_policy()

    def spoil(module, arguments, hidden):
        # finite forward, infinite derivative at 0: sqrt of an exact 0 on one token's hidden state
        chosen = arguments[0] == 42
        if not chosen.any():
            return hidden
        zero = (hidden[chosen] - hidden[chosen].detach()).abs().sum(-1, keepdim=True)
        spoiled = hidden.clone()
        spoiled[chosen] = hidden[chosen] + zero.sqrt()
        return spoiled

    model.model.embed_tokens.register_forward_hook(spoil)
    clean = [replace(one, token_ids=np.where(one.token_ids == 42, 41, one.token_ids)) for one in random_trajectories(5)]
    optimizer = adamw(model)
    before = weights(model)
    with pytest.raises(NonFiniteError, match="trajectory broken: the norm of its gradient"):
        update(model, [*clean, trajectory("broken", [1, 42, 3], [0, 0, 1])], optimizer=optimizer)
    assert torch.equal(weights(model), before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trajectory_that_fits_no_micro_batch_is_named_before_anything_moves():
    model = small_policy()
    before = weights(model)
    with pytest.raises(ShapeError, match="trajectory trajectory-000: a sequence of"):
        update(model, random_trajectories(1, shortest=40, longest=40), UpdateSettings(micro_batch_tokens=16))
    assert torch.equal(weights(model), before)


def test_bfloat16_updates_float32_weights():  # case H10
    exact = descent(random_trajectories(6), dtype=torch.float32)
    rounded = descent(random_trajectories(6), UpdateSettings(compute_dtype="bfloat16"), dtype=torch.float32)
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_steps": 0}, "optimizer_steps is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0"),
        ({"old_logprobs": "server"}, "expected trainer or sampler"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        UpdateSettings(**settings)
