"""One rank of sharded updates: a process each, which writes weights and metrics, or the error, of every case to a file.

Arguments: rank, number of ranks, rendezvous file, output file.
"""

import sys
from dataclasses import asdict, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mgrpo_core.errors import NonFiniteError
from mgrpo_core.update.logprobs import SampledLogprobs
from mgrpo_core.update.loss_settings import KLPenalty, LossSettings
from mgrpo_core.update.policy_gradient import UpdateSettings, policy_gradient
from mgrpo_core.update.training_trajectory import TrainingTrajectory
from tests.mgrpo_core.update.small_policies import random_trajectories, small_policy

CASES = ("uneven", "minibatches", "broken")


def settings_of(case: str) -> UpdateSettings:
    loss = LossSettings(kl=KLPenalty(0.1))
    steps = 3 if case == "minibatches" else 1
    return UpdateSettings(micro_batch_tokens=100, epochs=2, optimizer_steps=steps, loss=loss, max_grad_norm=0.05)


def shares(case: str) -> list[list[TrainingTrajectory]]:
    """Trajectories of each of two ranks; the second runs out of micro-batches first."""
    trajectories = random_trajectories(9, segments=True)
    if case == "broken":
        # an advantage so large that its loss overflows float32
        return [trajectories[:7], [replace(one, advantage=1e39) for one in trajectories[7:]]]
    return [trajectories[:7], trajectories[7:]]


class ProcessRanks:
    """Ranks of the default process group."""

    @property
    def count(self) -> int:
        return dist.get_world_size()

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = values.clone()
        dist.all_reduce(reduced, operation)
        return reduced


def sharded(seed: int) -> SampledLogprobs:
    scorer = SampledLogprobs(small_policy(seed))
    for layer in scorer.model.model.layers:
        fully_shard(layer)
    return fully_shard(scorer)


def whole_weights(scorer: SampledLogprobs) -> Tensor:
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in scorer.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def update(case: str, rank: int) -> dict[str, object]:
    scorer = sharded(0)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3, weight_decay=0.1)
    found: dict[str, object] = {"error": ""}
    try:
        metrics = policy_gradient(
            scorer,
            shares(case)[rank],
            optimizer,
            settings_of(case),
            rng=np.random.default_rng(7),
            reference=sharded(5),
            ranks=ProcessRanks(),
            all_ids=[one.trajectory_id for share in shares(case) for one in share],
        )
        found["metrics"] = asdict(metrics)
    except NonFiniteError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["weights"] = whole_weights(scorer)
    return found


if __name__ == "__main__":
    rank, count, rendezvous, output = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    torch.save({case: update(case, rank) for case in CASES}, f"{output}.{rank}")
    dist.destroy_process_group()
