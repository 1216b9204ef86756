"""A policy's parameters in parts, one a rank (FSDP2), and whole again."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from mgrpo_core.update.logprobs import SampledLogprobs
from mgrpo_core.update.update_settings import UpdateSettings


def shard(model: PreTrainedModel, settings: UpdateSettings, mesh: DeviceMesh) -> SampledLogprobs:
    """Keep this rank's part of every parameter, in its own dtype; layers are gathered one at a time.

    What is outside the layers (embeddings, tied or not, last norm, head) is gathered for the whole pass. The model's
    own parameters become the parts: names, and which of them are tied, stay.
    """
    dtype = torch.bfloat16 if settings.compute_dtype == "bfloat16" else torch.float32
    scorer = SampledLogprobs(model, logits_at_once=settings.logits_at_once, compute_dtype=dtype)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    return scorer


def whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece. Every rank calls it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(parts: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Parameters by name in one piece on the CPU, tied tensors as one; {} on a rank that need not keep them.

    Every rank calls it: each lends its parts.
    """
    gathered: dict[int, Tensor] = {}
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, part in parts.items():
            if id(part) not in gathered:
                tensor = whole(part)
                gathered[id(part)] = tensor.cpu() if keep else torch.empty(0)
            weights[name] = gathered[id(part)]
    return weights if keep else {}


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor where its parameter is: on its device, and only this rank's part of it."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    part = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return part.clone()  # the part alone: a view would hold the whole tensor in memory


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers: its one list of modules, in every causal LM that has one."""
    lists = [child for child in cast("Any", model).get_decoder().children() if isinstance(child, nn.ModuleList)]
    return list(lists[0]) if lists else []
