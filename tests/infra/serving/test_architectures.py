from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from infra.serving.embedded import EmbeddedPolicyClient
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.protocols import Sampling

SIZE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
}


def saved(config: PreTrainedConfig, folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZE),
        Qwen2Config(**SIZE),
        MistralConfig(**SIZE, sliding_window=None),
        Qwen3Config(**SIZE, head_dim=32, tie_word_embeddings=False),
    ],
    ids=lambda config: config.model_type,
)
async def test_logprobs_agree_with_a_plain_forward(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = saved(config, tmp_path)
    prompt = np.arange(30, dtype=np.int32)
    with EmbeddedPolicyClient("main", 96, threads=1) as client:
        client.load(0, tmp_path)
        made = await client.generate(prompt, Sampling(0.8, 20, 3), trajectory_id="t")
    ids = torch.from_numpy(np.concatenate([prompt, made.token_ids])).long()
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids[None]).logits[0] / 0.8, dim=-1)
    expected = logprobs[29:-1].gather(1, ids[30:, None])[:, 0]
    np.testing.assert_allclose(made.logprobs, expected.numpy(), atol=1e-5, rtol=0)


async def test_bfloat16_weights_sample_with_logprobs_of_their_own_logits(tmp_path: Path) -> None:
    model = saved(Qwen3Config(**SIZE, head_dim=32), tmp_path).to(torch.bfloat16)
    prompt = np.arange(30, dtype=np.int32)
    with EmbeddedPolicyClient("main", 96, threads=1, dtype=torch.bfloat16) as client:
        client.load(0, tmp_path)
        made = await client.generate(prompt, Sampling(1.0, 20, 3), trajectory_id="t")
    ids = torch.from_numpy(np.concatenate([prompt, made.token_ids])).long()
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
    expected = logprobs[29:-1].gather(1, ids[30:, None])[:, 0]
    # bfloat16 has 8 bits: logits of a few units are told apart by a few hundredths
    np.testing.assert_allclose(made.logprobs, expected.numpy(), atol=0.15, rtol=0)


def test_a_sliding_window_is_refused_at_load(tmp_path: Path) -> None:
    saved(MistralConfig(**SIZE, sliding_window=16), tmp_path)
    with EmbeddedPolicyClient("main", 96) as client, pytest.raises(ConfigError, match="no sliding window"):
        client.load(0, tmp_path)
