import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from mgrpo_core.errors import ConfigError
from mgrpo_core.update.logprobs import SampledLogprobs
from mgrpo_core.update.packing import MicroBatch, pack, plan_micro_batches
from tests.mgrpo_core.update.small_policies import random_trajectories, small_policy, trajectory
from tests.oracles import full_logits_logprobs


def score(scorer: SampledLogprobs, batch: MicroBatch):
    return scorer(
        batch.token_ids_BT,
        batch.attention_mask_BT,
        batch.position_ids_BT,
        batch.loss_mask_BT,
        batch.temperature_B,
    )


def packed(trajectories, side="right") -> MicroBatch:
    (segments,) = plan_micro_batches(trajectories, 10**6, keep_together=True).micro_batches
    return pack(trajectories, segments, side=side, pad_token_id=3)


def alike(count: int = 6):
    """Trajectories of nearly equal length, so that they share one micro-batch with some padding."""
    return random_trajectories(count, shortest=18, longest=20)


def oracle(model, trajectories, batch: MicroBatch):
    """Log-probs and entropies, by full logits of each sequence alone, at the batch's places."""
    logprobs = torch.zeros(batch.token_ids_BT.shape, dtype=next(model.parameters()).dtype)
    entropies = torch.zeros_like(logprobs)
    for row, (segment, offset) in enumerate(zip(batch.segments, batch.offsets, strict=True)):
        one = trajectories[segment.trajectory]
        ids = one.token_ids[segment.start : segment.stop].tolist()
        chosen, entropy = full_logits_logprobs(model, ids, one.scoring_temperature)
        mask = torch.from_numpy(one.loss_mask[segment.start + 1 : segment.stop])
        place = slice(offset + 1, offset + segment.length)
        logprobs[row, place] = torch.where(mask, chosen, 0.0)
        entropies[row, place] = torch.where(mask, entropy, 0.0)
    return logprobs, entropies


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("logits_at_once", [64, 64 * 7, 2**25])
def test_logprobs_and_entropies_equal_those_of_full_logits(side, logits_at_once):  # case B6: three temperatures
    model = small_policy(dtype=torch.float64)
    trajectories = alike()
    batch = packed(trajectories, side)
    assert not batch.attention_mask_BT.all()
    with torch.no_grad():
        logprobs, entropies = score(SampledLogprobs(model, logits_at_once=logits_at_once), batch)
        expected = oracle(model, trajectories, batch)
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropies, expected[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [64 * 5, 2**25])
def test_gradients_equal_those_of_full_logits(tied, logits_at_once):
    model = small_policy(dtype=torch.float64, tie_word_embeddings=tied)
    trajectories = alike(4)
    batch = packed(trajectories)
    torch.manual_seed(1)
    weights = torch.randn(2, *batch.token_ids_BT.shape, dtype=torch.float64)
    gradients = []
    for logprobs, entropies in (
        score(SampledLogprobs(model, logits_at_once=logits_at_once), batch),
        oracle(model, trajectories, batch),
    ):
        model.zero_grad()
        (logprobs * weights[0] + entropies * weights[1]).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)


def test_gradients_equal_finite_differences():
    model = small_policy(dtype=torch.float64, tie_word_embeddings=False, num_hidden_layers=1)
    batch = packed([trajectory("a", [5, 6, 7, 8, 9], [0, 1, 0, 1, 1], temperature=0.7)])
    scorer = SampledLogprobs(model, logits_at_once=64 * 2)
    head = model.get_output_embeddings()

    def of_head(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.functional_call(
            scorer,
            {"model.lm_head.weight": weight},
            (
                batch.token_ids_BT,
                batch.attention_mask_BT,
                batch.position_ids_BT,
                batch.loss_mask_BT,
                batch.temperature_B,
            ),
        )

    weight = head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(of_head, (weight,), fast_mode=True)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7, 1.0, 1.3])
def test_scores_are_those_of_the_distribution_sampled_from(temperature):  # case B6
    # logits 2, 1, 0, -1 whatever the context: a head of weight 0 and those biases
    config = LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config).eval()
    model.lm_head = nn.Linear(8, 4)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.tensor([2.0, 1.0, 0.0, -1.0]))
        batch = packed([trajectory("a", [0, 0, 1, 2, 3], [0, 1, 1, 1, 1], temperature=temperature)])
        logprobs, _ = score(SampledLogprobs(model), batch)
    expected = (torch.tensor([2.0, 1.0, 0.0, -1.0]) / temperature).log_softmax(0)
    torch.testing.assert_close(logprobs[0, 1:], expected)
    if temperature == 0.6:
        torch.testing.assert_close(
            logprobs[0, 1:], torch.tensor([-0.2081, -1.8747, -3.5414, -5.2081]), atol=1e-4, rtol=0
        )


def test_a_head_bias_gets_its_gradient():
    config = LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config).double().eval()
    model.lm_head = nn.Linear(8, 4).double()
    batch = packed([trajectory("a", [0, 0, 1, 2], [0, 1, 1, 1])])
    score(SampledLogprobs(model, logits_at_once=8), batch)[0].sum().backward()
    # d sum logp / d bias_v = count of v - sum of p_v
    with torch.no_grad():
        p = model(input_ids=torch.tensor([[0, 0, 1]])).logits[0].softmax(-1).sum(0)
    torch.testing.assert_close(model.lm_head.bias.grad, torch.tensor([1.0, 1, 1, 0]) - p)


def test_capped_logits_are_capped():
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).double().eval()
    trajectories = [trajectory("a", [3, 1, 4, 1, 5], [0, 1, 1, 1, 1])]
    batch = packed(trajectories)
    gradients = []
    for logprobs, entropies in (
        score(SampledLogprobs(model, logits_at_once=64), batch),
        oracle(model, trajectories, batch),
    ):
        model.zero_grad()
        (logprobs + 0.3 * entropies).sum().backward()
        gradients.append(model.get_output_embeddings().weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_scores_the_same_among_others_as_alone(side):  # case B7
    model = small_policy(dtype=torch.float64)
    trajectories = alike()
    scorer = SampledLogprobs(model)
    batch = packed(trajectories, side)
    with torch.no_grad():
        together, _ = score(scorer, batch)
        for row, (segment, offset) in enumerate(zip(batch.segments, batch.offsets, strict=True)):
            alone, _ = score(scorer, pack(trajectories, [segment]))
            torch.testing.assert_close(together[row, offset : offset + segment.length], alone[0], rtol=0, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_statistics():
    model = small_policy()
    batch = packed(alike(4))
    logprobs, _ = score(SampledLogprobs(model, compute_dtype=torch.bfloat16), batch)
    exact, _ = score(SampledLogprobs(model), batch)
    logprobs.sum().backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    exact.sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert logprobs.dtype == own.dtype == torch.float32
    assert 1e-6 < (logprobs - exact).abs().max() < 0.2  # bfloat16 has 8 bits: it must differ, and not by much
    assert torch.nn.functional.cosine_similarity(own, expected, dim=0) > 0.995


def test_logprobs_in_float32_agree_with_float64():
    trajectories = alike()
    batch = packed(trajectories)
    with torch.no_grad():
        single, _ = score(SampledLogprobs(small_policy()), batch)
        double, _ = score(SampledLogprobs(small_policy().double()), batch)
    assert (single - double).abs().max() < 2e-5


def test_no_sampled_position_gives_zeros_and_a_gradient_of_0():
    model = small_policy()
    batch = packed([trajectory("a", [5, 6, 7], [0, 1, 1])])
    batch.loss_mask_BT[:] = False
    logprobs, entropies = score(SampledLogprobs(model), batch)
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.tolist() == [[0.0, 0.0, 0.0]]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_head_that_is_no_plain_linear_map_is_refused():
    model = small_policy()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match="the output head Sequential"):
        SampledLogprobs(model)


def test_a_model_that_scales_its_logits_is_refused():
    model = small_policy()
    model.config.logit_scale = 0.0625
    with pytest.raises(ConfigError, match=r"config\.logit_scale is 0\.0625"):
        SampledLogprobs(model)
