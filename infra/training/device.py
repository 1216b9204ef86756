"""Where a policy is trained: on a GPU if torch sees one, else on the CPU. No other place decides."""

import torch

from mgrpo_core.errors import ConfigError


def training_device(local_rank: int = 0) -> torch.device:
    """The device of this process's update. `CUDA_VISIBLE_DEVICES` decides what torch sees; empty means the CPU.

    Args:
        local_rank: of several processes that share an update on this machine, which one: each has a GPU of its own.
    """
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def require_devices(policy: str, processes: int) -> None:
    """Raises: ConfigError where this machine shows GPUs, but fewer than an update has processes."""
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise ConfigError(
            f"execution.update_processes.{policy}: {processes} processes, but torch sees {torch.cuda.device_count()} "
            "GPUs here, and each process needs one. Lower it, or show more in CUDA_VISIBLE_DEVICES."
        )
