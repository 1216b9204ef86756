"""LoRA: what is trained is an adapter, what is used is the base with the adapter added."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.store.adapter_folder import link_base
from infra.training.adapters import put_adapter, save_adapter, trained_parameters
from infra.training.load_policy import load_model, load_tokenizer, load_trained
from infra.training.trainer import train_policy, update_settings
from mgrpo_core.config import LoraConfig, LossConfig, OptimizerConfig, PolicyConfig, UpdateConfig
from mgrpo_core.errors import ConfigError, TableIntegrityError
from mgrpo_core.update.policy_gradient import TrainingTrajectory, UpdateMetrics

LORA = LoraConfig(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
POLICY = PolicyConfig(init="x", optimizer=OptimizerConfig(lr=1e-2), lora=LORA)
IDS = torch.arange(1, 13)[None]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=64, head_dim=32, intermediate_size=48, tie_word_embeddings=True, **shape)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def update(source: Path, target: Path, seed: int, policy: PolicyConfig = POLICY, **settings: object) -> UpdateMetrics:
    """One update, and its base linked below what it wrote, as a version that is fetched has it."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(4):
        tokens, mask = rng.integers(0, 64, 12).astype(np.int32), np.arange(12) >= 4
        logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
        made.append(TrainingTrajectory(f"{number}", tokens, mask, logprobs, (0,), 1.0, float(rng.normal())))
    target.mkdir()
    wanted = update_settings(LossConfig(), UpdateConfig(**settings), policy)
    metrics = train_policy(source, target, made, policy, wanted, rng=np.random.default_rng(seed))
    if policy.lora is not None:
        link_base(target, source / "base" if (source / "base").exists() else source)
    return metrics


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def hashes(folder: Path) -> dict[str, str]:
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir() if one.is_file()}


def test_a_fresh_adapter_changes_nothing_and_freezes_the_rest(start):
    model = load_model(start, torch.float64)
    before, names = logits(model), set(dict(model.named_parameters()))
    put_adapter(model, LORA, seed=1)
    assert torch.equal(logits(model), before)
    trained = trained_parameters(model)
    assert len(trained) == 2 * 2 * 3  # A and B, in 2 layers, of 3 maps
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert not names & trained.keys()


def test_the_seed_decides_a_fresh_adapter_and_no_other_chance_is_touched(start):
    def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        model = load_trained(start, LORA, torch.float32, seed)
        return next(iter(trained_parameters(model).values())).detach(), torch.rand(3)

    (one, chance), (again, _), (other, _) = drawn(1), drawn(1), drawn(2)
    torch.manual_seed(5)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(chance, torch.rand(3))


def test_logits_with_the_adapter_are_those_of_the_merged_weights(start, tmp_path):
    update(start, tmp_path / "1", 1)
    apart = load_trained(tmp_path / "1", LORA, torch.float64, 0)
    merged = load_model(tmp_path / "1", torch.float64)
    torch.testing.assert_close(logits(merged), logits(apart), rtol=0, atol=1e-13)
    assert (logits(merged) - logits(load_model(start, torch.float64))).abs().max() > 1e-3
    # by hand: W + 6/4 B A
    file = load_file(tmp_path / "1" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.v_proj"
    b, a = (file[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "BA")
    wanted = load_file(start / "model.safetensors")[f"{name}.weight"].double() + 1.5 * b @ a
    torch.testing.assert_close(merged.state_dict()[f"{name}.weight"], wanted, rtol=0, atol=1e-15)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft 0.21's
def test_peft_itself_reads_the_adapter_as_we_do(start, tmp_path):
    from peft import PeftModel

    update(start, tmp_path / "1", 1)
    theirs = PeftModel.from_pretrained(load_model(start, torch.float64), tmp_path / "1")
    torch.testing.assert_close(logits(theirs), logits(load_model(tmp_path / "1", torch.float64)), rtol=0, atol=1e-13)


def test_gradients_of_the_adapter_are_those_of_the_formula(start):
    model = load_model(start, torch.float64)
    put_adapter(model, LORA, seed=1)
    layer = model.model.layers[0].self_attn.v_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        b.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    seen: dict[str, torch.Tensor] = {}
    layer.register_forward_hook(
        lambda _, inputs, out: (seen.update(x=inputs[0]), out.register_hook(_keep(seen)))[1] and None
    )
    model(input_ids=IDS).logits.log_softmax(-1)[0, :, 3].sum().backward()
    x, g = seen["x"][0], seen["g"][0]
    # y = W x + s B A x with s = 6/4: dL/dB = s g^T (A x), dL/dA = s (B^T g)^T x
    torch.testing.assert_close(b.grad, 1.5 * g.T @ (x @ a.T), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a.grad, 1.5 * (g @ b).T @ x, rtol=1e-10, atol=1e-12)
    assert model.model.layers[0].self_attn.k_proj.weight.grad is None


def _keep(seen: dict[str, torch.Tensor]):
    return lambda gradient: seen.update(g=gradient)


def test_an_update_writes_an_adapter_with_its_moments_and_nothing_else(start, tmp_path):
    before = hashes(start)
    metrics = update(start, tmp_path / "1", 1)
    assert metrics.optimizer_steps == 1
    assert hashes(start) == before, "the base"
    assert sorted(hashes(tmp_path / "1")) == [
        "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json",
    ]  # fmt: skip
    moments = load_file(tmp_path / "1" / "optimizer.safetensors")
    assert moments
    assert all(".lora_" in name for name in moments)


def test_the_same_update_gives_the_same_bytes(start, tmp_path):
    for name in ("one", "again"):
        update(start, tmp_path / name, 1)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "again")


def test_two_updates_through_files_equal_two_in_one_go(start, tmp_path):
    """Two passes over one batch, then the same two as updates of their own: the moments survive the file."""
    update(start, tmp_path / "both", 1, epochs=2, old_logprobs="sampler")
    update(start, tmp_path / "1", 1, old_logprobs="sampler")
    update(tmp_path / "1", tmp_path / "2", 1, old_logprobs="sampler")
    both, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("both", "2"))
    assert both.keys() == two.keys()
    for name, tensor in both.items():
        assert torch.equal(tensor, two[name]), name
    assert json.loads((tmp_path / "2" / "trainer_state.json").read_text())["optimizer_steps"] == 2


def test_losing_the_moments_would_change_the_next_update(start, tmp_path):
    update(start, tmp_path / "1", 1)
    update(tmp_path / "1", tmp_path / "2", 2)
    for file in ("optimizer.safetensors", "trainer_state.json"):
        (tmp_path / "1" / file).unlink()
    update(tmp_path / "1", tmp_path / "forgetful", 2)
    assert hashes(tmp_path / "2") != hashes(tmp_path / "forgetful")


def test_training_all_weights_goes_on_from_the_merged_adapter(start, tmp_path):
    update(start, tmp_path / "1", 1)
    update(tmp_path / "1", tmp_path / "2", 2, PolicyConfig(init="x", optimizer=OptimizerConfig(lr=1e-9)))
    assert "adapter_config.json" not in hashes(tmp_path / "2")
    gap = logits(load_model(tmp_path / "2", torch.float32)) - logits(load_model(tmp_path / "1", torch.float32))
    assert gap.abs().max() < 1e-6  # one step of at most 1e-9 a weight


def test_bfloat16_is_rounded_after_the_sum_not_before(start, tmp_path):
    update(start, tmp_path / "1", 1)
    exact, coarse = (load_model(tmp_path / "1", dtype).state_dict() for dtype in (torch.float32, torch.bfloat16))
    for name, tensor in exact.items():
        assert torch.equal(coarse[name], tensor.bfloat16()), name


def test_an_adapter_of_another_shape_is_refused(start, tmp_path):
    update(start, tmp_path / "1", 1)
    wider = POLICY.model_copy(update={"lora": LORA.model_copy(update={"rank": 8})})
    with pytest.raises(ConfigError, match=r"r 4, wanted 8.*begun with"):
        update(tmp_path / "1", tmp_path / "2", 2, wider)


def test_a_module_that_is_not_there_is_named_with_those_that_are(start):
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no linear map c_attn .*down_proj, gate_proj, k_proj"):
        put_adapter(load_model(start, torch.float32), LoraConfig(target_modules=("q_proj", "c_attn")), 0)


@pytest.mark.parametrize("damage", ["a name", "a shape", "half", "no rank"])
def test_an_adapter_that_does_not_fit_is_an_error_in_words(start, tmp_path, damage):
    update(start, tmp_path / "1", 1)
    file = tmp_path / "1" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".lora_A." in name)
    if damage == "a name":
        tensors[name.replace("layers.", "layers.9")] = tensors.pop(name)
    elif damage == "a shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif damage == "half":
        del tensors[name.replace("lora_A", "lora_B")]
    else:
        (tmp_path / "1" / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    save_file(tensors, file)
    for load in (
        lambda: load_model(tmp_path / "1", torch.float32),
        lambda: load_trained(tmp_path / "1", LORA, torch.float32, 0),
    ):
        with pytest.raises(TableIntegrityError, match=r"fit|plain LoRA|no part"):
            load()


def test_the_tokenizer_is_that_of_the_base(start, tmp_path):
    update(start, tmp_path / "1", 1)
    with pytest.raises(ConfigError, match=r"1/base: no tokenizer in it"):
        load_tokenizer(tmp_path / "1")


def test_rank_and_scale_are_in_the_file(start, tmp_path):
    model = load_model(start, torch.float32)
    put_adapter(model, LORA, 0)
    (tmp_path / "a").mkdir()
    save_adapter(tmp_path / "a", LORA, trained_parameters(model))
    said = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 6, ["down_proj", "q_proj", "v_proj"])
