"""AdamW's moments and step count on disk: safetensors and a small JSON file, no pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from infra.training.sharding import placed_like, whole
from mgrpo_core.errors import TableIntegrityError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_TENSORS = "optimizer.safetensors"
_NUMBERS = "trainer_state.json"
TRAINER_FILES = (_TENSORS, _NUMBERS)


def save_optimizer(
    folder: Path | None, optimizer: torch.optim.AdamW, model: torch.nn.Module, optimizer_steps: int
) -> None:
    """Write the moments (float32) by parameter name, and the steps taken since version 0.

    A parameter without a moment, never reached by a gradient, has none in the file either. The files are the same
    whatever the device, and however many ranks share the model: all of them call this, and one has a folder.
    """
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            counts[name] = int(state["step"])
            for moment in _MOMENTS:
                tensor = whole(state[moment])
                if folder is not None:
                    tensors[f"{moment}.{name}"] = tensor.cpu().contiguous()
    if folder is None:
        return
    save_file(tensors, folder / _TENSORS)
    numbers = {"optimizer_steps": optimizer_steps, "parameter_steps": counts}
    (folder / _NUMBERS).write_text(json.dumps(numbers, sort_keys=True, indent=1), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.AdamW, model: torch.nn.Module) -> int:
    """Put what `save_optimizer` wrote into a fresh optimiser over `model`; return the steps taken so far.

    A folder without trainer state (version 0 as it came from elsewhere) leaves the optimiser fresh and returns 0.

    Raises:
        TableIntegrityError: one of the two files is missing, or a moment fits no parameter of the model.
    """
    numbers_file, tensors_file = folder / _NUMBERS, folder / _TENSORS
    if not numbers_file.exists() and not tensors_file.exists():
        return 0
    try:
        numbers = json.loads(numbers_file.read_text(encoding="utf-8"))
        with safe_open(tensors_file, framework="pt") as tensors:
            _load_moments(folder, tensors, numbers["parameter_steps"], optimizer, model)
    except (OSError, ValueError, SafetensorError) as error:
        raise TableIntegrityError(
            f"{folder}: trainer state is incomplete or unreadable ({error}). "
            "Restore the version from backup, or resume from the iteration before."
        ) from error
    return int(numbers["optimizer_steps"])


def _load_moments(
    folder: Path, tensors: Any, steps: dict[str, int], optimizer: torch.optim.AdamW, model: torch.nn.Module
) -> None:
    """One tensor at a time: a rank keeps its part of each."""
    parameters, there = dict(model.named_parameters()), set(tensors.keys())
    for name, count in steps.items():
        state = {"step": torch.tensor(float(count))}
        for moment in _MOMENTS:
            key = f"{moment}.{name}"
            whole_moment = tensors.get_tensor(key) if key in there else None
            if name not in parameters or whole_moment is None or whole_moment.shape != parameters[name].shape:
                raise TableIntegrityError(
                    f"{folder}: the moments of {name!r} do not fit the weights beside them. "
                    "The files are of two versions; restore the folder from backup."
                )
            state[moment] = placed_like(whole_moment, parameters[name])
        optimizer.state[parameters[name]] = state
