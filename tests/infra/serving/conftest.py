from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
CONTEXT = 160


def tiny_qwen3(seed: int, **changes: object) -> Qwen3ForCausalLM:
    """A Qwen3 with uneven logits: at the default initialisation every token is about equally likely."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The trainer's view of version 1: a plain model with stock attention."""
    return tiny_qwen3(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    path = tmp_path_factory.mktemp("version-1")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def next_model() -> PreTrainedModel:
    return tiny_qwen3(2)


@pytest.fixture(scope="session")
def next_folder(tmp_path_factory: pytest.TempPathFactory, next_model: PreTrainedModel) -> Path:
    path = tmp_path_factory.mktemp("version-2")
    next_model.save_pretrained(path)
    return path
