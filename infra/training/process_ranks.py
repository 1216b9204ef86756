"""The ranks of a sharded update as the default process group, which torchrun has described in the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infra.training.device import training_device


@dataclass(frozen=True, slots=True)
class ProcessRanks:
    """This process and the others: `Ranks` of the core, and what sharding needs besides."""

    index: int
    count: int
    mesh: DeviceMesh

    def sum(self, values: Tensor) -> Tensor:
        return _reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        return _reduced(values, dist.ReduceOp.MAX)


@contextmanager
def process_ranks(patience_s: float) -> Iterator[ProcessRanks]:
    """Join the process group for as long as the block runs: nccl on GPUs, one a rank; gloo on the CPU.

    Args:
        patience_s: how long a rank waits for another that is loading or reading.
    """
    device = training_device(int(os.environ["LOCAL_RANK"]))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timedelta(seconds=patience_s), device_id=device if on_gpu else None
    )
    count = dist.get_world_size()
    yield ProcessRanks(dist.get_rank(), count, init_device_mesh(device.type, (count,)))
    dist.destroy_process_group()  # not after an error: it would wait for the others


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = values.clone()
    dist.all_reduce(reduced, operation)
    return reduced
