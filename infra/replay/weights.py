"""Two folders of one policy version, number by number: weights, moments, and what lies beside them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from infra.replay.verdicts import Difference, Outcome, StageVerdict

TOLERANCE = 1e-6
"""Of a weight or moment, absolute: what a sum in another order moves (several processes, a GPU, other threads)."""

_RECORDS = ("version.json", "update.json")  # of the run, not of the policy
_LIBRARY = ("transformers_version",)  # says who wrote the file


def compare_versions(stage: str, stored: Path, recomputed: Path) -> StageVerdict:
    """Compare every file of a version; tensors one at a time, by their bits.

    Args:
        stage: for the verdict.
        stored: folder of the run's version.
        recomputed: the replay's.
    """
    compared = differing = 0
    close, largest, first = False, 0.0, None
    for numbers, unequal, gap, found in _differences(stored, recomputed):
        compared += numbers
        largest = max(largest, gap)
        if unequal:
            differing += unequal
            first = first or found
        elif found is not None:
            close = True
    outcome = Outcome.DIFFERS if differing else Outcome.CLOSE if close else Outcome.EQUAL
    return StageVerdict(stage, outcome, compared, "numbers", differing, f"{TOLERANCE:g} absolute", largest, first)


_Found = tuple[int, int, float, Difference | None]
"""Numbers compared, how many are far apart, the largest gap, and the first that is not equal to the bit."""


def _differences(stored: Path, recomputed: Path) -> Iterator[_Found]:
    names = {path.name for folder in (stored, recomputed) for path in folder.iterdir() if path.is_file()}
    for name in sorted(names - set(_RECORDS), key=lambda one: (not one.endswith(".safetensors"), one)):
        ours, theirs = recomputed / name, stored / name
        if not ours.exists() or not theirs.exists():
            there = ("present", "none") if theirs.exists() else ("none", "present")
            yield 0, 1, 0.0, Difference(None, None, f"file {name}", *there)
        elif name.endswith(".safetensors"):
            yield from _tensors(name, theirs, ours)
        elif _content(ours) != _content(theirs):
            hashes = (hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in (theirs, ours))
            yield 0, 1, 0.0, Difference(None, None, f"file {name}", *(f"sha256 {one}" for one in hashes))


def _tensors(name: str, stored: Path, recomputed: Path) -> Iterator[_Found]:
    with safe_open(stored, framework="pt") as theirs, safe_open(recomputed, framework="pt") as ours:
        keys = set(theirs.keys()), set(ours.keys())
        for key in sorted(keys[0] | keys[1]):
            if key not in keys[0] or key not in keys[1]:
                there = ("present", "none") if key in keys[0] else ("none", "present")
                yield 0, 1, 0.0, Difference(None, None, f"{name}, tensor {key}", *there)
            else:
                yield _tensor(f"{name}, tensor {key}", theirs.get_tensor(key), ours.get_tensor(key))


def _tensor(where: str, stored: torch.Tensor, recomputed: torch.Tensor) -> _Found:
    if stored.shape != recomputed.shape or stored.dtype != recomputed.dtype:
        kinds = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (stored, recomputed))
        return stored.numel(), 1, 0.0, Difference(None, None, where, *kinds)
    theirs, ours = stored.flatten().contiguous(), recomputed.flatten().contiguous()
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.element_size()]
    unequal = theirs.view(size) != ours.view(size)
    if not unequal.any():
        return len(theirs), 0, 0.0, None
    gap = (theirs.double() - ours.double()).abs()
    far = unequal & ~(gap <= TOLERANCE)
    place = int((far if far.any() else unequal).int().argmax())
    values = (repr(float(tensor[place])) for tensor in (theirs, ours))
    largest = float(gap[torch.isfinite(gap)].max()) if torch.isfinite(gap).any() else 0.0
    return len(theirs), int(far.sum()), largest, Difference(None, None, f"{where}, number {place}", *values)


def _content(path: Path) -> object:
    """A file's bytes; of a model's JSON what it says of the model."""
    data = path.read_bytes()
    if path.name not in ("config.json", "generation_config.json"):
        return data
    try:
        found: Any = json.loads(data)
    except ValueError:
        return data
    return {key: value for key, value in found.items() if key not in _LIBRARY} if isinstance(found, dict) else found
