"""From logits to tokens: one uniform number a token, by the inverse of the cumulative distribution."""

import numpy as np
import torch


def uniforms_of(seed: int, count: int) -> np.ndarray:
    """The first `count` uniform numbers in [0, 1) of a request, float64; a function of its seed alone.

    Philox is counter-based and takes the seed as its key, so it needs no mixing step of its own.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw_tokens(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row from softmax(logits / temperature); temperature 0 takes the likeliest token.

    token = min {v : P(0) + … + P(v) > u · P(V)} with cumulative sums in float64. A row's result depends on that row
    only, up to the rounding of its logits.

    Args:
        logits_BV: float32 [B, V].
        temperature_B: float32 [B], >= 0.
        uniform_B: float64 [B], in [0, 1).
    Returns: token ids, int64 [B], and their log-probabilities, float32 [B], at the temperature (at 1 where it is 0).
        NaN where a row holds NaN or infinity: such a row's token means nothing.
    """
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprob_BV = torch.log_softmax(scaled_BV, dim=-1)
    cumulative_BV = logprob_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    # A draw equal to the whole mass would find no token: stay one step below it.
    mass_B = cumulative_BV[:, -1]
    target_B = torch.minimum(uniform_B * mass_B, torch.nextafter(mass_B, torch.zeros_like(mass_B)))
    token_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
    token_B = token_B.clamp_(max=logits_BV.shape[1] - 1)
    if bool(greedy_B.any()):
        token_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), token_B)
    finite_B = torch.isfinite(logits_BV.sum(dim=-1))
    logprob_B = logprob_BV.gather(1, token_B[:, None])[:, 0]
    return token_B, torch.where(finite_B, logprob_B, torch.nan)
