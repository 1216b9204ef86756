"""AdamW's moments and step count on disk: safetensors and a small JSON file, no pickle."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mgrpo_core.errors import TableIntegrityError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_TENSORS = "optimizer.safetensors"
_NUMBERS = "trainer_state.json"
TRAINER_FILES = (_TENSORS, _NUMBERS)


def save_optimizer(folder: Path, optimizer: torch.optim.AdamW, model: torch.nn.Module, optimizer_steps: int) -> None:
    """Write the moments (float32) by parameter name, and the steps taken since version 0.

    A parameter without a moment, never reached by a gradient, has none in the file either.
    """
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            counts[name] = int(state["step"])
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = state[moment].contiguous()
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
        tensors = load_file(tensors_file)
    except (OSError, ValueError) as error:
        raise TableIntegrityError(
            f"{folder}: trainer state is incomplete or unreadable ({error}). "
            "Restore the version from backup, or resume from the iteration before."
        ) from error
    parameters = dict(model.named_parameters())
    for name, count in numbers["parameter_steps"].items():
        moments = {moment: tensors.get(f"{moment}.{name}") for moment in _MOMENTS}
        if name not in parameters or any(m is None or m.shape != parameters[name].shape for m in moments.values()):
            raise TableIntegrityError(
                f"{folder}: the moments of {name!r} do not fit the weights beside them. "
                "The files are of two versions; restore the folder from backup."
            )
        optimizer.state[parameters[name]] = {"step": torch.tensor(float(count)), **moments}
    return int(numbers["optimizer_steps"])
