"""Prints the peak resident memory, in bytes, that one forward and backward pass adds. A process of its own measures it.

Arguments: `chunked` or `full`, the number of positions.
"""

import resource
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mgrpo_core.update.logprobs import SampledLogprobs

VOCABULARY = 150_000


def wide_policy() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def loss_of(model: Qwen3ForCausalLM, how: str, positions: int) -> torch.Tensor:
    """Minus the sum of log-probs of `positions` sampled tokens, in rows of 257 with one prompt token each."""
    token_ids_BT = torch.arange(positions // 256 * 257).reshape(-1, 257) * 577 % VOCABULARY
    mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
    mask_BT[:, 0] = False
    if how == "chunked":
        position_ids_BT = torch.arange(257).expand_as(token_ids_BT)
        attention_mask_BT = torch.ones_like(mask_BT)
        temperature_B = torch.ones(len(token_ids_BT))
        logprobs_BT, _ = SampledLogprobs(model)(
            token_ids_BT, attention_mask_BT, position_ids_BT, mask_BT, temperature_B
        )
        return -logprobs_BT.sum()
    logits = model(input_ids=token_ids_BT).logits[:, :-1]
    return -logits.log_softmax(-1).gather(2, token_ids_BT[:, 1:, None]).sum()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    policy = wide_policy()
    loss_of(policy, "chunked", 256).backward()  # optimiser-independent buffers and libraries are paid for
    before = peak_bytes()
    loss_of(policy, sys.argv[1], int(sys.argv[2])).backward()
    print(peak_bytes() - before)
