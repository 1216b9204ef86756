"""The sender with vLLM's trainer side around it, but for NCCL, which needs GPUs. Run by vLLM's Python: SENDER.

Weights go through the store of vLLM's own rendezvous, after vLLM's own comparison with what was announced.
"""

import importlib.util
import sys
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group


def broadcast(self: Any, source: Any, meta: Any) -> None:
    for _, weight in self._checked_iter(source, meta):
        self.model_update_group.group.broadcast(weight, src=0)


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("nccl_sender", path)
    assert spec is not None
    assert spec.loader is not None
    sender = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sender)
    sender.refusal = lambda: None
    sender.gpu = lambda: torch.device("cpu")
    nccl_engine.open_trainer_endpoint = lambda info: stateless_init_process_group(
        info.master_address, info.master_port, 0, info.world_size, 0
    )
    nccl_engine.NCCLTrainerWeightTransferEngine._broadcast = broadcast
    sender.main()


if __name__ == "__main__":
    main(sys.argv[-1])
