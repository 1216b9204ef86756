"""Are the stored log-probs those of the policy version that sampled? Scored again by the trainer's path."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from infra.replay.policy_logprobs import Sampled, logprobs_under, sampled_trajectories
from infra.replay.verdicts import Difference, Outcome, StageVerdict
from infra.store.sampled_by import versions_that_sampled
from infra.store.stored_iteration import StoredIteration
from infra.training.device import training_device
from infra.training.load_policy import load_model

TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""Nats a token, by what the policy computes in: sampler and trainer are two programs, and never agree to the bit."""


def check_logprobs(stored: StoredIteration, policy: str, folder_of: Callable[[int], Path]) -> StageVerdict:
    """Score every sampled token of a policy's agents again.

    Args:
        stored: the iteration.
        policy: which one.
        folder_of: a version -> its folder.
    """
    config = stored.config
    tolerance = TOLERANCE[config.policies[policy].dtype]
    agents = [name for name, agent in config.agents.items() if agent.policy == policy]
    compared = differing = 0
    largest, first = 0.0, None
    for group, scores in _scored(stored, policy, agents, folder_of):
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


def _scored(
    stored: StoredIteration, policy: str, agents: Sequence[str], folder_of: Callable[[int], Path]
) -> Iterator[tuple[list[Sampled], list[np.ndarray]]]:
    """Trajectories, and log-probs of their tokens under the version that sampled each: one model at a time."""
    paths = [ref.path for agent in agents for ref in stored.shards(agent)]
    for version in versions_that_sampled(stored.files, paths, policy):
        model = cast("Any", load_model(folder_of(version), torch.float32)).to(training_device())
        for rows in sampled_trajectories(stored, agents):
            group = [one for one in rows if one.policy_version == version]
            yield group, logprobs_under(model, [one.trajectory for one in group], stored.config, policy)


def _difference(one: Sampled, score_T: np.ndarray, token: int) -> Difference:
    stored = float(one.trajectory.sampler_logprobs[token])
    where = f"log-prob of token {token}"
    return Difference(one.agent, one.trajectory.trajectory_id, where, repr(stored), repr(float(score_T[token])))
