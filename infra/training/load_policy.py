"""One way to read a policy's folder, shared by the trainer and the embedded engine, so that both hold equal weights."""

from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from infra.store.adapter_folder import is_adapter, whole_folder
from infra.training.adapters import load_adapter, merged, put_adapter
from infra.training.no_progress_bar import no_progress_bar
from infra.training.one_model_at_a_time import one_model_at_a_time
from mgrpo_core.config import LoraConfig
from mgrpo_core.errors import ConfigError, TemplateError

_EXPECTED = "a Hugging Face folder: config.json, model.safetensors (or its shards with an index), tokenizer.json"
_TELLTALE = {"config.json": "config.json", "weights": "*.safetensors", "tokenizer": "tokenizer*.json"}


def load_policy(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of one policy version, from disk only.

    Raises:
        ConfigError: the folder is missing, incomplete or unreadable, or its weights do not fill its architecture.
        TemplateError: the tokenizer brings no chat template.
    """
    return load_model(folder, dtype), load_tokenizer(folder)


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model alone, in evaluation mode (no dropout), every parameter read from the folder; an adapter merged.

    transformers fills parameters that a checkpoint lacks with random numbers and a log line; here that is an error.

    Raises:
        ConfigError: as `load_policy`.
        TableIntegrityError: an adapter cannot be read, or does not fit its base.
    """
    if is_adapter(folder):
        # added up in float32 at least: in bfloat16 most of a small adapter would round away
        base = load_model(whole_folder(folder), torch.promote_types(dtype, torch.float32))
        return cast("PreTrainedModel", merged(base, folder).to(dtype))  # pyright: ignore[reportArgumentType]
    folder = _readable(folder, "config.json", "weights")
    try:
        with one_model_at_a_time, no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with their names
            )
    except Exception as error:  # transformers, safetensors and json raise a dozen kinds; all mean an unreadable folder
        raise ConfigError(f"{folder}: cannot be read as a model ({error}). Expected {_EXPECTED}.") from error
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if wrong:
        raise ConfigError(
            f"{folder}: the weights do not fill the architecture in config.json ({wrong}); they would start at random. "
            "Save the model and its config together with save_pretrained."
        )
    return model.eval()


def load_trained(folder: Path, lora: LoraConfig | None, dtype: torch.dtype, adapter_seed: int) -> PreTrainedModel:
    """The model as an update trains it: all weights, or a frozen base under an adapter.

    Args:
        folder: whole weights, which a first adapter is put on, or an adapter, which goes on; without `lora`, an adapter
            is merged.
        lora: see there.
        dtype: of the weights.
        adapter_seed: of a first adapter.

    Raises: ConfigError, TableIntegrityError, as `load_model` and `load_adapter`.
    """
    if lora is None:
        return load_model(folder, dtype)
    model = load_model(whole_folder(folder), dtype)
    put_adapter(model, lora, adapter_seed)
    if is_adapter(folder):
        load_adapter(model, folder, lora)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template.

    Raises: ConfigError and TemplateError, as `load_policy`.
    """
    folder = _readable(whole_folder(folder), "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{folder}: cannot be read as a tokenizer ({error}). Expected {_EXPECTED}.") from error
    if not tokenizer.chat_template:
        raise TemplateError(
            f"{folder}: the tokenizer has no chat template, got a folder without chat_template.jinja and without "
            "`chat_template` in tokenizer_config.json. Use a chat model's folder, or add a template to it."
        )
    return tokenizer


def _readable(folder: Path, *parts: str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Expected {_EXPECTED}.")
    missing = [part for part in parts if not any(folder.glob(_TELLTALE[part]))]
    if missing:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ConfigError(f"{folder}: no {' and no '.join(missing)} in it, found {found}. Expected {_EXPECTED}.")
    return folder
