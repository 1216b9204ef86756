"""Proof that a server computes with the weights that the trainer made: the log-probs of a fixed probe on both sides.

An acknowledgement proves nothing. The probe is a prompt of fixed tokens, cut at several places; the server samples one
token after each cut, by the route that rollouts take, and the trainer's weights say what that token's log-prob is.
It begins alike at every version, so keys and values that outlived an update are found, too; it is sampled at a
temperature other than 1, so a server that reports log-probs before temperature is found.

What it cannot see: a difference below the tolerance. In bfloat16, or after a step of lr 1e-6, old and new weights may
be that close; the label of the weights, which every answer carries, tells those apart.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from infra.serving.vllm.failures import ServerUnfitError
from infra.training.load_policy import load_model
from infra.training.one_model_at_a_time import one_model_at_a_time
from mgrpo_core.rollout.protocols import Sampling
from mgrpo_core.seeds import seed_of

TEXT = (
    "Which river flows through the capital of the country that borders both? <answer>The Danube, 2,850 km.</answer> "
    "Naïve café — 北京, Ελλάδα, \U0001f600.\n\n\tdef f(x):  return x*2  # <tool_call>"
)
"""Also encoded by both tokenizers."""

TEMPERATURE = 0.7
_CUTS = 16
# Longer than a block of any server's cache (128 tokens on the CPU, 16 on CUDA): shorter prefixes are never reused. Not
# much longer: the block is computed once, but what follows it at every cut, and adapters are slow on a CPU.
_SHORTEST = 129
_LONGEST = 144


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the server's log-probs may be from the trainer's float32 ones, in nats."""

    mean: float
    most: float


TOLERANCE = {
    "float32": Tolerance(mean=2e-5, most=1e-4),
    # measured on a 135 M model: mean 0.037, most 0.417 in bfloat16 against itself
    "bfloat16": Tolerance(mean=0.1, most=0.75),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """What the trainer's weights say about the probe.

    Attributes:
        prompt_ids: int32 [T].
        cuts: lengths of prompts.
        logits_NV: the trainer's after each cut, float32.
    """

    prompt_ids: np.ndarray
    cuts: tuple[int, ...]
    logits_NV: torch.Tensor

    def logprobs(self, token_N: np.ndarray, temperature: float) -> np.ndarray:
        """Of one token after each cut."""
        logprobs_NV = torch.log_softmax(self.logits_NV / temperature, dim=-1)
        return logprobs_NV[torch.arange(len(token_N)), torch.from_numpy(token_N).long()].numpy()


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """|server - trainer| over the cuts, in nats."""

    mean: float
    most: float


def probe_of(folder: Path, text_ids: list[int], context: int) -> Probe:
    """The trainer's side, in float32 whatever the policy's dtype. Holds the model only while it computes.

    Args:
        folder: of the version, as the trainer wrote it.
        text_ids: of TEXT; repeated to the probe's length.
        context: of the policy.
    """
    longest = min(_LONGEST, context - 1)
    ids = np.resize(np.asarray(text_ids, dtype=np.int32), longest)
    cuts = np.unique(np.linspace(min(_SHORTEST, max(1, longest // 2)), longest, _CUTS).astype(int))
    model = load_model(folder, torch.float32)
    # Not beside a model that is being built, either: its precision would be the default of tensors that are made here.
    with one_model_at_a_time, torch.inference_mode():
        logits = model(
            input_ids=torch.from_numpy(ids).long()[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(cuts - 1),
        ).logits[0]
    return Probe(ids, tuple(int(cut) for cut in cuts), logits.float().clone())


async def prove(
    probe: Probe, sample: Callable[[np.ndarray, Sampling], Awaitable[tuple[int, float]]], dtype: str, where: str
) -> ProbeGap:
    """Compare a server with the trainer.

    Args:
        probe: the trainer's side.
        sample: samples one token by the rollouts' route; gives it and its log-prob.
        dtype: of the server's computation.
        where: policy, version and server, for the message.

    Raises: ServerUnfitError with the numbers of both sides where they are further apart than TOLERANCE.
    """

    async def at(cut: int) -> tuple[int, float]:
        return await sample(probe.prompt_ids[:cut], Sampling(TEMPERATURE, 1, seed_of("probe", cut)))

    # The first alone: it leaves the block in the cache that all others begin with. They need no more than a step.
    drawn = [await at(probe.cuts[0])]
    answers = await asyncio.gather(*map(at, probe.cuts[1:]), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):  # the first error counts when no request is under way any more
            raise answer
        drawn.append(answer)
    token_N = np.array([token for token, _ in drawn])
    server_N = np.array([logprob for _, logprob in drawn])
    if (token_N >= probe.logits_NV.shape[1]).any():
        raise ServerUnfitError(f"{where}: sampled an id beyond the trainer's vocabulary of {probe.logits_NV.shape[1]}.")
    trainer_N = probe.logprobs(token_N, TEMPERATURE)
    gap_N = np.abs(server_N - trainer_N)
    gap = ProbeGap(float(gap_N.mean()), float(gap_N.max()))
    allowed = TOLERANCE[dtype]
    if gap.mean <= allowed.mean and gap.most <= allowed.most:  # False where either is NaN
        return gap
    worst = int(np.nan_to_num(gap_N, nan=np.inf).argmax())
    raw_gap = np.abs(server_N - probe.logprobs(token_N, 1.0)).max()
    advice = (
        "They are those before temperature: start the server with --logprobs-mode processed_logprobs, as `mgrpo serve` "
        "does."
        if raw_gap <= allowed.most
        else "The server computes with other weights (old ones, a tied output head that stayed, keys cached before the "
        "update) or in another dtype. Start it anew with `mgrpo serve`; the iteration's version is in the store."
    )
    raise ServerUnfitError(
        f"{where}: log-probs of the probe differ from the trainer's by {gap.most:.3g} at most and {gap.mean:.3g} on "
        f"average; allowed in {dtype} are {allowed.most:g} and {allowed.mean:g}. Token {token_N[worst]} after "
        f"{probe.cuts[worst]} tokens: server {server_N[worst]:.6f}, trainer {trainer_N[worst]:.6f}. {advice}"
    )
