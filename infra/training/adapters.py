"""LoRA adapters by peft: put on a model to be trained, saved in peft's layout, and merged into the weights to be used.

What samples, scores and is proven at servers is the merged model, W + alpha/rank * B A, computed in float32; what is
trained has base and adapter apart. The two differ by rounding.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.store.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.training.one_model_at_a_time import one_model_at_a_time
from mgrpo_core.config import LoraConfig
from mgrpo_core.errors import ConfigError, TableIntegrityError

_NAME = "default"
_PREFIX = "base_model.model."  # of the names in a file of peft's

_NOT_SUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


def put_adapter(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Give the model's layers a fresh adapter, and freeze all else: B = 0, so the model computes what it did.

    Args:
        model: changed in place; it keeps its class.
        lora: rank, scale and place.
        seed: of A.

    Raises: ConfigError as `require_targets`.
    """
    # peft takes seconds to import, and most runs train all weights
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    require_targets(model, lora)
    config = PeftConfig(r=lora.rank, lora_alpha=cast("int", lora.alpha), target_modules=list(lora.target_modules))
    with one_model_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    model.eval()


def load_adapter(model: PreTrainedModel, folder: Path, lora: LoraConfig) -> None:
    """Fill the adapter that `put_adapter` made with the one in `folder`.

    Raises:
        ConfigError: the folder's has another rank, scale or place.
        TableIntegrityError: its files cannot be read, or do not fit together.
    """
    stored, wanted = _stored_config(folder), _config_json(lora)
    other = [name for name in ("r", "lora_alpha", "target_modules") if stored[name] != wanted[name]]
    if other:
        what = "; ".join(f"{name} {stored[name]!r}, wanted {wanted[name]!r}" for name in other)
        raise ConfigError(
            f"{folder}: the policy's adapter has {what}. An adapter keeps its shape for as long as a run lasts: give "
            "the `lora` settings that it was begun with, or start another run."
        )
    tensors = _stored_tensors(folder)
    parameters = {_file_name(name): parameter for name, parameter in trained_parameters(model).items()}
    wrong = sorted(tensors.keys() ^ parameters.keys()) or [
        name for name, tensor in tensors.items() if tensor.shape != parameters[name].shape
    ]
    if wrong:
        raise TableIntegrityError(
            f"{folder}: the adapter does not fit its base: {len(wrong)} tensors differ in name or shape, the first "
            f"{wrong[0]}. The files are of two policies; restore the folder from backup."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def save_adapter(folder: Path, lora: LoraConfig, weights: Mapping[str, Tensor]) -> None:
    """Write an adapter in peft's layout; equal adapters give equal bytes.

    Args:
        folder: an existing one.
        lora: what it was put on with.
        weights: by the model's names, as `trained_parameters` gives them.
    """
    text = json.dumps(_config_json(lora), sort_keys=True, indent=2)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    tensors = {_file_name(name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter in `folder` added to its weights; it is changed in place.

    Raises: TableIntegrityError: the adapter cannot be read, or does not fit.
    """
    config = _stored_config(folder)
    scale = config["lora_alpha"] / config["r"]
    tensors = _stored_tensors(folder)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
            target = f"{name.removeprefix(_PREFIX).removesuffix('.lora_A.weight')}.weight"
            pair = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."), None)
            if (
                target not in weights
                or pair[1] is None
                or (pair[1].shape[0], pair[0].shape[1]) != weights[target].shape
            ):
                raise TableIntegrityError(f"{folder}: {name} does not fit the base. Restore the folder from backup.")
            weights[target] += scale * (pair[1].to(weights[target].dtype) @ pair[0].to(weights[target].dtype))
    if tensors:
        raise TableIntegrityError(f"{folder}: {min(tensors)} is no part of an adapter. Restore the folder from backup.")
    return model


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that an optimiser steps, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def require_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Raises: ConfigError where a target module names no linear map of the layers; it says which ones there are."""
    there = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    }
    missing = sorted(set(lora.target_modules) - there)
    if missing:
        raise ConfigError(
            f"lora.target_modules: {type(model).__name__} has no linear map {', '.join(missing)} in its layers. Those "
            f"that it has: {', '.join(sorted(there))}."
        )


def _file_name(name: str) -> str:
    """A parameter's name in a file of peft's."""
    return f"{_PREFIX}{name.replace(f'.{_NAME}.', '.')}"


def _config_json(lora: LoraConfig) -> dict[str, Any]:
    """What peft and vLLM need to know of an adapter; not what the peft at hand would add, which differs by version."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.target_modules),
        "modules_to_save": None,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }


def _stored_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        found["target_modules"] = sorted(found["target_modules"])
        unknown = [name for name in _NOT_SUPPORTED if found.get(name)]
        if found["peft_type"] != "LORA" or unknown or not found["r"] > 0:
            raise ValueError(f"a {found['peft_type']} adapter with {', '.join(unknown) or 'rank 0'}")
        float(found["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableIntegrityError(
            f"{folder}/{ADAPTER_CONFIG}: is no plain LoRA adapter's ({error}). Restore the folder from backup."
        ) from error
    return found


def _stored_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise TableIntegrityError(
            f"{folder}/{ADAPTER_WEIGHTS}: cannot be read ({error}). Restore the folder from backup."
        ) from error
