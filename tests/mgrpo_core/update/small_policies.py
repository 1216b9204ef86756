"""Tiny real policies and trajectories for tests of the update."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mgrpo_core.update.training_trajectory import TrainingTrajectory

VOCABULARY = 64


def small_policy(seed: int = 0, *, dtype: torch.dtype = torch.float32, **config: object) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers and 64 tokens, random weights."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.2,  # logits that differ, so that probabilities do
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | config))).to(dtype).eval()


def trajectory(
    trajectory_id: str,
    token_ids: Sequence[int],
    mask: Sequence[int],
    *,
    sampler: Sequence[float] | None = None,
    segment_starts: tuple[int, ...] = (0,),
    temperature: float = 1.0,
    advantage: float = 1.0,
    weight: float = 1.0,
) -> TrainingTrajectory:
    return TrainingTrajectory(
        trajectory_id=trajectory_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool),
        sampler_logprobs=np.full(len(token_ids), np.nan) if sampler is None else np.array(sampler),
        segment_starts=segment_starts,
        temperature=temperature,
        advantage=advantage,
        weight=weight,
    )


def random_trajectories(
    count: int, seed: int = 0, *, shortest: int = 6, longest: int = 24, segments: bool = False
) -> list[TrainingTrajectory]:
    """Trajectories with a prompt, sampled tokens and observations between them."""
    rng = np.random.default_rng(seed)
    made: list[TrainingTrajectory] = []
    for index in range(count):
        length = int(rng.integers(shortest, longest + 1))
        mask = rng.random(length) < 0.5
        mask[:2] = False
        mask[-1] = True
        starts = (0, length // 2) if segments and index % 2 else (0,)
        mask[list(starts)] = False
        made.append(
            TrainingTrajectory(
                trajectory_id=f"trajectory-{index:03d}",
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                sampler_logprobs=np.where(mask, rng.normal(-4, 0.3, length), np.nan),
                segment_starts=starts,
                temperature=(1.0, 0.7, 1.3)[index % 3],
                advantage=float(rng.normal()),
                weight=(1.0, 2.0, 0.75)[index % 3],
            )
        )
    return made
