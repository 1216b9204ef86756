"""One update as files: state survives, tied weights stay tied, nothing to train writes nothing."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.training.load_policy import load_model
from infra.training.optimizer_state import load_optimizer, save_optimizer
from infra.training.trainer import train_policy, update_settings
from mgrpo_core.config import LossConfig, OptimizerConfig, PolicyConfig, UpdateConfig
from mgrpo_core.errors import NonFiniteError, TableIntegrityError
from mgrpo_core.update.policy_gradient import TrainingTrajectory, UpdateMetrics

POLICY = PolicyConfig(init="x", optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1, schedule="cosine", total_steps=9))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=64, head_dim=32, intermediate_size=64, tie_word_embeddings=True, **shape)
    folder = tmp_path / "start"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("as it was")
    return folder


def trajectories(seed: int, advantage: float | None = None) -> list[TrainingTrajectory]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(4):
        tokens = rng.integers(0, 64, 12).astype(np.int32)
        mask = np.arange(12) >= 4
        logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
        value = float(rng.normal()) if advantage is None else advantage
        made.append(TrainingTrajectory(f"{number}", tokens, mask, logprobs, (0,), 1.0, value))
    return made


def update(source: Path, target: Path, seed: int, **kwargs: object) -> UpdateMetrics:
    target.mkdir()
    settings = update_settings(LossConfig(), UpdateConfig(), POLICY)
    return train_policy(source, target, trajectories(seed, **kwargs), POLICY, settings, rng=np.random.default_rng(seed))


def test_two_updates_through_files_equal_two_in_memory_bit_for_bit(start, tmp_path):  # case H3
    update(start, tmp_path / "1", 1)
    second = update(tmp_path / "1", tmp_path / "2", 2)
    # warm-up 1, cosine to 9: step 1 is at part 0 of the cosine
    assert second.lr == pytest.approx(1e-2)

    model = load_model(start, torch.float32)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    from mgrpo_core.update.policy_gradient import policy_gradient

    for step, rate in ((1, 0.0), (2, 1e-2)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        settings = update_settings(LossConfig(), UpdateConfig(), POLICY)
        policy_gradient(model, trajectories(step), optimizer, settings, rng=np.random.default_rng(step))
    saved = load_model(tmp_path / "2", torch.float32)
    for (name, mine), theirs in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_losing_the_moments_would_change_the_next_update(start, tmp_path):  # case H3, the wrong way round
    update(start, tmp_path / "1", 1)
    update(tmp_path / "1", tmp_path / "2", 2)
    for file in ("optimizer.safetensors", "trainer_state.json"):
        (tmp_path / "1" / file).unlink()
    update(tmp_path / "1", tmp_path / "forgetful", 2)
    kept, lost = (load_file(tmp_path / name / "model.safetensors") for name in ("2", "forgetful"))
    assert any(not torch.equal(kept[name], lost[name]) for name in kept)


def test_adam_continues_its_moments_and_its_step_count(tmp_path):  # case H3: lr 1e-3, 50 gradients of 1, then 0.01
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    for _ in range(50):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    save_optimizer(tmp_path, optimizer, model, 50)

    fresh = torch.nn.Linear(1, 1, bias=False)
    fresh.load_state_dict(model.state_dict())
    again = torch.optim.AdamW(fresh.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    assert load_optimizer(tmp_path, again, fresh) == 50
    before = fresh.weight.item()
    fresh.weight.grad = torch.full((1, 1), 0.01)
    again.step()
    assert before - fresh.weight.item() == pytest.approx(0.00090973, abs=2e-7)  # float32 weights


def test_tied_weights_are_saved_once_and_are_tied_after_loading(start, tmp_path):  # case H4
    update(start, tmp_path / "1", 1)
    assert "lm_head.weight" not in load_file(tmp_path / "1" / "model.safetensors")
    model = load_model(tmp_path / "1", torch.float32)
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    before = model.get_output_embeddings().weight.clone()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    assert torch.equal(model.get_output_embeddings().weight, before + 1.0)


def test_masters_and_moments_are_saved_in_float32_whatever_the_policy_computes_in(start, tmp_path):  # case H10
    policy = POLICY.model_copy(update={"dtype": "bfloat16"})
    (tmp_path / "1").mkdir()
    settings = update_settings(LossConfig(), UpdateConfig(), policy)
    train_policy(start, tmp_path / "1", trajectories(1), policy, settings, rng=np.random.default_rng(0))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert {tensor.dtype for tensor in load_file(tmp_path / "1" / file).values()} == {torch.float32}


def test_steps_too_small_for_bfloat16_still_move_the_master(start, tmp_path):  # case H10
    small = OptimizerConfig(lr=1e-7, weight_decay=0.0)  # a step of about 1e-7; bfloat16 spacing near 0.02 is 1.2e-4
    policy = PolicyConfig(init="x", dtype="bfloat16", optimizer=small)
    (tmp_path / "1").mkdir()
    settings = update_settings(LossConfig(), UpdateConfig(), policy)
    train_policy(start, tmp_path / "1", trajectories(1), policy, settings, rng=np.random.default_rng(0))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "1"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert (before[name] != after[name]).float().mean() > 0.5
    assert (before[name].bfloat16() != after[name].bfloat16()).float().mean() < 0.01


def test_nothing_to_train_takes_no_step_and_writes_nothing(start, tmp_path):  # case D1
    metrics = update(start, tmp_path / "1", 1, advantage=0.0)
    assert metrics.optimizer_steps == 0
    assert list((tmp_path / "1").iterdir()) == []


def test_files_that_training_leaves_alone_are_copied_byte_for_byte(start, tmp_path):
    update(start, tmp_path / "1", 1)
    assert (tmp_path / "1" / "tokenizer.json").read_text() == "as it was"


def test_a_broken_weight_stops_before_anything_is_written(start, tmp_path):
    model = load_model(start, torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = math.nan
    model.save_pretrained(start)
    with pytest.raises(NonFiniteError, match="trajectory"):
        update(start, tmp_path / "1", 1)
    assert list((tmp_path / "1").iterdir()) == []


def test_half_a_trainer_state_is_refused(start, tmp_path):  # case H5
    update(start, tmp_path / "1", 1)
    (tmp_path / "1" / "optimizer.safetensors").unlink()
    with pytest.raises(TableIntegrityError, match="trainer state is incomplete"):
        update(tmp_path / "1", tmp_path / "2", 2)
