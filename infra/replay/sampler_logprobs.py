"""Are the stored log-probs those of the policy version that sampled? Scored again by the trainer's path."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from infra.replay.policy_logprobs import Sampled, logprobs_under, sampled_trajectories
from infra.replay.verdicts import Difference, Outcome, StageVerdict
from infra.store.stored_iteration import StoredIteration
from infra.training.device import training_device
from infra.training.load_policy import load_model

TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""Nats a token, by what the policy computes in: sampler and trainer are two programs, and never agree to the bit."""


def check_logprobs(stored: StoredIteration, policy: str, source: Path) -> StageVerdict:
    """Score every sampled token of a policy's agents again.

    Args:
        stored: the iteration.
        policy: which one.
        source: folder of the version that sampled.
    """
    config = stored.config
    tolerance = TOLERANCE[config.policies[policy].dtype]
    agents = [name for name, agent in config.agents.items() if agent.policy == policy]
    model = cast("Any", load_model(source, torch.float32)).to(training_device())
    compared = differing = 0
    largest, first = 0.0, None
    for group in sampled_trajectories(stored, agents):
        scores = logprobs_under(model, [one.trajectory for one in group], config, policy)
        for one, score_T in zip(group, scores, strict=True):
            gap_T = np.abs(np.asarray(one.trajectory.sampler_logprobs, dtype=np.float64) - score_T)
            known_T = ~np.isnan(gap_T)
            far_T = known_T & (gap_T > tolerance)
            compared += int(known_T.sum())
            differing += int(far_T.sum())
            largest = max(largest, float(gap_T[known_T].max(initial=0.0)))
            if first is None and far_T.any():
                first = _difference(one, score_T, int(far_T.argmax()))
    outcome = Outcome.DIFFERS if differing else Outcome.CLOSE if largest else Outcome.EQUAL
    stage = f"log-probs {policy}"
    return StageVerdict(stage, outcome, compared, "tokens", differing, f"{tolerance:g} nats a token", largest, first)


def _difference(one: Sampled, score_T: np.ndarray, token: int) -> Difference:
    stored = float(one.trajectory.sampler_logprobs[token])
    where = f"log-prob of token {token}"
    return Difference(one.agent, one.trajectory.trajectory_id, where, repr(stored), repr(float(score_T[token])))
