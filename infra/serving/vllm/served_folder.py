"""A policy version laid out so that vLLM can take new weights of it while it runs.

vLLM reads every safetensors file of a folder, the optimiser's state beside the weights, too: that is left out.

vLLM packs a tied output head at its start and leaves it as it was when weights are reloaded: log-probs are then those
of all new weights under the old head. A folder whose head is written out and whose config says "not tied" has no such
head to forget. It costs the embedding matrix once more, on disk and in the server; the trainer's folder stays tied.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from infra.store.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.training.one_model_at_a_time import one_model_at_a_time
from mgrpo_core.errors import ConfigError

_HEAD = "head.safetensors"
_BODY = "body.safetensors"
_ONLY_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TIED = "tie_word_embeddings"


def served_folder(folder: Path, target: Path, *, moved: bool = False) -> Path:
    """The folder to give to vLLM: `folder` itself where that will do, else `target`, made if it is not there.

    Args:
        folder: as the trainer wrote it.
        target: named after what is in it: it is not made again. Files are linked where the file system can, else
            copied.
        moved: make `target` in any case: servers cannot read `folder`.

    Raises: ConfigError if the architecture's tied weights are not an embedding and its head.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied = _is_tied(folder, config)
    weight_map = _weight_map(folder)
    others = {path.name for path in folder.glob("*.safetensors")} - set(weight_map.values())
    if not (tied or others or moved):
        return folder

    def fill(partial: Path) -> None:
        _link_files(folder, partial, but={*others, *(("config.json", _INDEX) if tied else ())})
        if tied:
            _untie(folder, config, weight_map, partial)

    return _made_once(target, fill)


def served_adapter(folder: Path, target: Path, *, moved: bool = False) -> Path:
    """The folder of an adapter to give to vLLM, which reads the adapter's own two files and nothing else.

    Args:
        folder: of the version.
        target: as for `served_folder`; never used for another adapter.
        moved: make `target`: servers cannot read `folder`.
    """
    if not moved:
        return folder

    def fill(partial: Path) -> None:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(folder / name, partial / name)

    return _made_once(target, fill)


def _made_once(target: Path, fill: Callable[[Path], None]) -> Path:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
        # made for one user; servers may run as another
        partial.chmod(0o755)
        try:
            fill(partial)
            partial.rename(target)
        except OSError:
            if not target.exists():  # else another process was first, with the same bytes
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_tied(folder: Path, config: dict[str, object]) -> bool:
    if _TIED in config:
        return bool(config[_TIED])
    return bool(getattr(AutoConfig.from_pretrained(folder, local_files_only=True), _TIED, False))


def _untie(folder: Path, config: dict[str, object], weight_map: dict[str, str], target: Path) -> None:
    head, embedding = _tied_names(folder)
    with safe_open(folder / weight_map[embedding], framework="pt") as weights:
        save_file({head: weights.get_tensor(embedding)}, target / _HEAD, metadata={"format": "pt"})
    if (target / _ONLY_FILE).exists():  # under this name it would count as the whole model, and the index for nothing
        (target / _ONLY_FILE).rename(target / _BODY)
    files = {name: _BODY if file == _ONLY_FILE else file for name, file in weight_map.items()}
    index = {"metadata": {}, "weight_map": {**files, head: _HEAD}}
    (target / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    (target / "config.json").write_text(json.dumps({**config, _TIED: False}, indent=2), encoding="utf-8")


def _tied_names(folder: Path) -> tuple[str, str]:
    """Names of the head's and the embedding's weight."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with one_model_at_a_time, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"{folder}: {type(model).__name__} has no output head that could be written out beside its tied embedding. "
            "Give the policy a model with tie_word_embeddings: false, or leave its `servers` empty."
        )
    return f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"


def _weight_map(folder: Path) -> dict[str, str]:
    """Weight -> file, as transformers would read the folder."""
    if (folder / _ONLY_FILE).is_file():
        with safe_open(folder / _ONLY_FILE, framework="pt") as weights:
            return dict.fromkeys(weights.keys(), _ONLY_FILE)
    if (folder / _INDEX).is_file():
        return dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    raise ConfigError(f"{folder}: neither {_ONLY_FILE} nor {_INDEX} in it. Save the policy with save_pretrained.")


def _link_files(folder: Path, target: Path, but: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name not in but:
            # Hard links: they hold under any path by which a server sees the folder.
            try:
                (target / path.name).hardlink_to(path)
            except OSError:
                shutil.copyfile(path, target / path.name)
