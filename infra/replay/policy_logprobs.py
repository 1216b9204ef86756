"""Log-probs of an iteration's sampled tokens under a policy version, a row group at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration
from infra.store.tables import stream_table
from infra.store.trajectory_rows import list_arrays
from infra.training.trainer import update_settings
from mgrpo_core.config import RunConfig
from mgrpo_core.update.dropout import dropout_off
from mgrpo_core.update.logprobs import SampledLogprobs
from mgrpo_core.update.packing import pack, plan_micro_batches
from mgrpo_core.update.training_trajectory import TrainingTrajectory

_COLUMNS = (
    "trajectory_id", "token_ids", "loss_mask", "logprobs", "segment_starts", "temperature", "sampled_tokens",
    "policy_version",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled:
    """A stored trajectory with a sampled token, without credit.

    Attributes:
        policy_version: whose weights sampled it.
    """

    agent: str
    policy_version: int
    trajectory: TrainingTrajectory


def sampled_trajectories(stored: StoredIteration, agents: Sequence[str]) -> Iterator[list[Sampled]]:
    """Row groups of the agents' tables; rows without a sampled token are left out."""
    for agent in agents:
        for ref in stored.shards(agent):
            for group in stream_table(stored.files, ref.path, TRAJECTORIES, _COLUMNS):
                token_ids, masks, logprobs, starts = (list_arrays(group.column(name)) for name in _COLUMNS[1:5])
                rows = group.select(["trajectory_id", "temperature", "sampled_tokens", "policy_version"]).to_pylist()
                yield [
                    Sampled(
                        agent,
                        row["policy_version"],
                        TrainingTrajectory(
                            trajectory_id=row["trajectory_id"],
                            token_ids=token_ids[index],
                            loss_mask=masks[index].astype(np.bool_),
                            sampler_logprobs=logprobs[index].astype(np.float32),
                            segment_starts=tuple(starts[index].tolist()),
                            temperature=row["temperature"],
                            advantage=0.0,
                        ),
                    )
                    for index, row in enumerate(rows)
                    if row["sampled_tokens"] > 0
                ]


def logprobs_under(
    model: nn.Module, trajectories: Sequence[TrainingTrajectory], config: RunConfig, policy: str
) -> list[np.ndarray]:
    """Log-probs of each trajectory's sampled tokens, as its update computes them; NaN at all other places.

    Args:
        model: on the device where it computes.
        trajectories: with a sampled token each.
        config: of the run.
        policy: whose.
    """
    settings = update_settings(config.loss, config.update, config.policies[policy])
    dtype = torch.bfloat16 if settings.compute_dtype == "bfloat16" else torch.float32
    scorer = SampledLogprobs(model, logits_at_once=settings.logits_at_once, compute_dtype=dtype)
    found = {index: np.full(len(one.token_ids), np.nan) for index, one in enumerate(trajectories)}
    device = next(model.parameters()).device
    with torch.no_grad(), dropout_off(model):
        for segments in plan_micro_batches(trajectories, settings.micro_batch_tokens).micro_batches:
            batch = pack(trajectories, segments, side=settings.padding_side, device=device)
            scores_BT, _ = scorer(
                batch.token_ids_BT,
                batch.attention_mask_BT,
                batch.position_ids_BT,
                batch.loss_mask_BT,
                batch.temperature_B,
            )
            batch.take_back(scores_BT, found)
    return [np.where(one.loss_mask, found[index], np.nan) for index, one in enumerate(trajectories)]
