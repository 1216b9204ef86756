"""A team that costs next to nothing: real Qwen3 policies of 40,000 weights that say one of a few whole actions.

Their weights are set by hand to a Markov chain over tokens: the prompt's last token leads to an action, chosen by a
weight, and an action to the end of the turn. So a run has delegations, answers right and wrong, and malformed turns in
known shares, with no training beforehand; gradients, moments and log-probs are those of any Qwen3.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from infra.quickstart.tokenizers import END_OF_TURN, build_tokenizer

RED = "<answer>red</answer>"
BLUE = "<answer>blue</answer>"
MALFORMED = "<answer>"


def ask(agent: str) -> str:
    """The turn that delegates to `agent`."""
    return f'<tool_call>{{"name": "{agent}", "arguments": {{"task": "which colour"}}}}</tool_call>'


MAIN_SAYS = {ask("searcher"): 0.55, RED: 0.2, BLUE: 0.2, MALFORMED: 0.05}
SUB_SAYS = {RED: 0.45, BLUE: 0.45, MALFORMED: 0.1}

_HIDDEN = 32
SIZE = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_CERTAIN = 14.0  # logit above the vocabulary's others, of which there are about 300: they come once in 4,000 tokens


def save_policy(folder: Path, says: Mapping[str, float], *, seed: int) -> Path:
    """A policy whose every turn is one of `says`, with these probabilities."""
    tokenizer = build_tokenizer(["red blue which colour is it"], list(says), 300)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **SIZE,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    prompt_end = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)[-1]
    say_nothing_else(model, tokenizer, says, prompt_end, tokenizer.convert_tokens_to_ids(END_OF_TURN))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def say_nothing_else(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    says: Mapping[str, float],
    prompt_end: int,
    end_of_turn: int,
) -> None:
    """Set embedding and head, so that after `prompt_end` comes one of `says`, and after that `end_of_turn`."""
    actions = {tokenizer.convert_tokens_to_ids(text): share for text, share in says.items()}
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # Direction 0: an action is due; 1: the turn ends; 2: anything else. The layers add their small noise to it.
        for row, direction in [(slice(None), 2), (prompt_end, 0), *((action, 1) for action in actions)]:
            embedding[row, :3] = torch.eye(3)[direction]
        unit = math.sqrt(_HIDDEN)  # length of a normed vector along one direction
        head[:, :3] = 0.0
        head[end_of_turn, 1] = _CERTAIN / unit
        for action, share in actions.items():
            head[action, 0] = (_CERTAIN + math.log(share)) / unit


def save_policies(folder: Path) -> Path:
    """The folder of the team's policies, `main` and `sub`."""
    save_policy(folder / "main", MAIN_SAYS, seed=1)
    save_policy(folder / "sub", SUB_SAYS, seed=2)
    return folder


def save_queries(path: Path, count: int = 6) -> Path:
    """Questions whose answer is red for the even ones, blue for the odd ones."""
    lines = [
        json.dumps(
            {"id": f"q{number}", "question": f"Which colour is {number}?", "answer": ("red", "blue")[number % 2]}
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def config_of(policies: Path, queries: Path) -> dict[str, Any]:
    """Two agents with a policy each, 2 queries x 4 rollouts an iteration; no tool, no judge."""
    limits = {"max_turns": 4, "max_turn_tokens": 6, "max_observation_tokens": 16, "max_delegations": 3}
    optimizer = {"lr": 0.01, "weight_decay": 0.0}
    return {
        "iterations": 1,
        "agents": {
            "main": {
                "policy": "main",
                "prompt": "Say the colour.",
                "delegates": ["searcher"],
                "limits": limits,
                "reward": {"format": 0.1, "correct": 0.9},
            },
            "searcher": {
                "policy": "sub",
                "prompt": "Look it up.",
                "description": "Knows colours.",
                "limits": limits,
                "reward": {"format": 0.5, "main_correct": 0.5, "expert": 0.0},
                "d": 2,
            },
        },
        "policies": {
            name: {"init": str(policies / name), "context": 384, "optimizer": dict(optimizer)}
            for name in ("main", "sub")
        },
        "data": {"train": str(queries)},
        "rollout": {"queries_per_iteration": 2, "rollouts_per_query": 4},
        "execution": {"threads": 1},
        "tracking": {"mlflow": False},
    }


def save_config(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return path
