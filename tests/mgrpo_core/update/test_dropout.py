import pytest
import torch
from torch import nn

from mgrpo_core.update.dropout import dropout_off
from tests.mgrpo_core.update.small_policies import small_policy


def noisy_policy(*, checkpointing: bool):
    model = small_policy(attention_dropout=0.5)
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.3))
    if checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def logits(model):
    return model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_inside_and_back_on_outside(checkpointing):
    model = noisy_policy(checkpointing=checkpointing)
    assert not torch.equal(logits(model), logits(model))
    with dropout_off(model):
        assert torch.equal(logits(model), logits(model))
    assert model.training
    assert model.model.norm[1].p == 0.3
    assert model.model.layers[0].self_attn.attention_dropout == 0.5
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(("checkpointing", "runs"), [(True, 2), (False, 1)])
def test_gradient_checkpointing_stays_active(checkpointing, runs):
    # A checkpointed layer runs again in the backward pass, and transformers checkpoints in training mode only.
    model = noisy_policy(checkpointing=checkpointing)
    calls: list[int] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    with dropout_off(model):
        logits(model).sum().backward()
    assert len(calls) == runs


def test_modes_come_back_even_after_an_error():
    model = noisy_policy(checkpointing=False)
    model.model.layers[0].eval()
    with pytest.raises(RuntimeError), dropout_off(model):
        raise RuntimeError
    assert (model.training, model.model.layers[0].training, model.model.layers[1].training) == (True, False, True)
