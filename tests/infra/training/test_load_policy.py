import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infra.training.load_policy import load_model, load_policy
from mgrpo_core.errors import ConfigError, TemplateError

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_policy_folder_gives_model_and_tokenizer(folder: Path) -> None:
    model, tokenizer = load_policy(folder, torch.float32)
    assert (model.training, model.dtype) == (False, torch.float32)
    assert tokenizer.encode("a c b") == [1, 3, 2]
    assert tokenizer.chat_template == TEMPLATE


def test_tied_weights_are_still_tied(folder: Path) -> None:
    # case H4
    model, _ = load_policy(folder, torch.float32)
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_loading_again_gives_the_same_bits(folder: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(load_model(folder, torch.float32)(ids).logits, load_model(folder, torch.float32)(ids).logits)


def test_a_folder_without_chat_template_is_a_template_error(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match="no chat template"):
        load_policy(folder, torch.float32)


def test_a_missing_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder. Expected a Hugging Face folder: config.json"):
        load_policy(tmp_path / "nowhere", torch.float32)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "no config.json in it, found chat_template.jinja, .*model.safetensors"),
        ("model.safetensors", "no weights in it"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(folder: Path, name: str, words: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=words):
        load_policy(folder, torch.float32)


def test_a_truncated_weights_file_is_a_config_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_policy(folder, torch.float32)


def test_a_config_that_is_not_json_is_a_config_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_policy(folder, torch.float32)


def test_a_missing_parameter_is_not_filled_with_chance(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing_keys.*layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32)


def test_a_parameter_of_another_shape_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match="up_proj"):
        load_model(folder, torch.float32)
