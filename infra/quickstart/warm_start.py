"""Builds the quickstart's two policies from nothing: `python -m infra.quickstart.warm_start --out DIR`.

Skills first, on made-up facts; then a mix of good and bad habits (see `demonstrations`). What is shipped beside this
file came out of it with the default settings.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.progress import track
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infra.quickstart.demonstrations import (
    GOOD,
    MAIN_PROMPT,
    MIXED,
    SUB_PROMPT,
    Demonstration,
    Demonstrator,
    Habits,
    real_names,
)
from infra.quickstart.tokenizers import END_OF_TURN, build_tokenizer
from mgrpo_core.dialogue.template import ChatTemplate, ChatTokenizer
from mgrpo_core.dialogue.transcript import TokenStream, Transcript
from mgrpo_core.seeds import rng_of, seed_of

Role = Literal["main", "sub"]

_MARKUP = {
    "main": ('<tool_call>{"name": "searcher", "arguments": {"task": "', '"}}</tool_call>', "<answer>", "</answer>"),
    "sub": ('<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>', "<answer>", "</answer>"),
}
_HEADERS = ("system\n", "user\n", "assistant\n", "tool\n", "\n")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the policies are a function of."""

    seed: int = 0
    vocabulary: int = 3000
    hidden: int = 128
    layers: int = 4
    batch: int = 32
    skill_steps: int = 1200
    sub_skill_steps: int = 3000  # to pick one of three documents takes longest
    habit_steps: int = 80
    lr: float = 1.5e-3
    habit_lr: float = 4e-4
    dialogues: int = 40_000  # distinct ones that skill steps draw from

    def sha256(self) -> str:
        """Of the recipe and the habits, recorded beside the weights."""
        text = json.dumps([asdict(self), asdict(GOOD), asdict(MIXED)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def build_policy(role: Role, recipe: Recipe, out: Path, *, show: bool = True) -> dict[str, float]:
    """Train one policy and save it in `out`; returns the last losses of both phases."""
    torch.manual_seed(seed_of(recipe.seed, "warm start", role))
    rng = rng_of(recipe.seed, "warm start", role)
    demonstrator = Demonstrator(rng)
    tokenizer = _tokenizer(role, demonstrator, recipe)
    encode = Encoder(tokenizer)
    model = Qwen3ForCausalLM(_config(tokenizer, recipe))
    model.train()

    def dialogues(habits: Habits, count: int) -> list[TokenStream]:
        draw = demonstrator.main if role == "main" else demonstrator.sub
        drawn = track(range(count), f"{role}: dialogues", disable=not show)
        return [encode(draw(habits)) for _ in drawn]

    losses = {}
    skill_steps = recipe.skill_steps if role == "main" else recipe.sub_skill_steps
    skills = dialogues(GOOD, min(recipe.dialogues, skill_steps * recipe.batch))
    losses["skill"] = _train(model, skills, skill_steps, recipe.lr, recipe.batch, rng, f"{role}: skill", show)
    if recipe.habit_steps:
        mixed = dialogues(MIXED, recipe.habit_steps * recipe.batch)
        losses["habit"] = _train(
            model, mixed, recipe.habit_steps, recipe.habit_lr, recipe.batch, rng, f"{role}: habit", show
        )
    out.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "recipe.json").write_text(json.dumps({"sha256": recipe.sha256(), **asdict(recipe)}, indent=1) + "\n")
    return losses


class Encoder:
    """Dialogues as rollouts see them, token for token: through the same transcript."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(_as_chat_tokenizer(tokenizer))

    def __call__(self, demonstration: Demonstration) -> TokenStream:
        transcript = Transcript(self._template, system=demonstration.system, user=demonstration.user)
        for index, turn in enumerate(demonstration.turns):
            ids = self._tokenizer.encode(turn, add_special_tokens=False)
            transcript.sampled(np.array([*ids, self._tokenizer.eos_token_id]), None, "stop")
            if index < len(demonstration.replies):
                transcript.observe(demonstration.replies[index], max_tokens=256, context_length=1024, reply_tokens=64)
        return transcript.stream()


def _as_chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> ChatTokenizer:
    return tokenizer  # type: ignore[return-value]


def _tokenizer(role: Role, demonstrator: Demonstrator, recipe: Recipe) -> PreTrainedTokenizerFast:
    draw = demonstrator.main if role == "main" else demonstrator.sub
    demonstrations = [draw(GOOD) for _ in range(6000)]
    texts = [text for one in demonstrations for text in (one.user, *one.turns, *one.replies)]
    names = real_names()
    every = [*names.countries, *names.capitals, *names.cities, *(v for values in names.values.values() for v in values)]
    fixed = [MAIN_PROMPT, SUB_PROMPT, *_HEADERS]
    # The policies' vocabularies differ: agents must not depend on sharing one.
    size = recipe.vocabulary if role == "main" else recipe.vocabulary + 200
    return build_tokenizer([*texts, *every * 5, *fixed * 2000], _MARKUP[role], size)


def _config(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // 32,
        num_key_value_heads=max(1, recipe.hidden // 64),
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        bos_token_id=None,
    )


def _train(
    model: Qwen3ForCausalLM,
    pool: list[TokenStream],
    steps: int,
    lr: float,
    batch: int,
    rng: np.random.Generator,
    title: str,
    show: bool,
) -> float:
    """Next-token prediction on the agent's own tokens; returns the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.1)
    losses: list[float] = []
    for streams in track(_batches(pool, steps, batch, rng), title, total=steps, disable=not show):
        ids, mask = _padded(streams)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        chosen = mask[:, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _batches(pool: list[TokenStream], steps: int, batch: int, rng: np.random.Generator) -> Iterator[list[TokenStream]]:
    order: list[int] = []
    for _ in range(steps):
        if len(order) < batch:
            order = rng.permutation(len(pool)).tolist()
        yield [pool[order.pop()] for _ in range(batch)]


def _padded(streams: list[TokenStream]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right padding: with causal attention, real tokens never see it."""
    longest = max(len(stream.token_ids) for stream in streams)
    ids = torch.zeros(len(streams), longest, dtype=torch.long)
    mask = torch.zeros(len(streams), longest, dtype=torch.bool)
    for row, stream in enumerate(streams):
        ids[row, : len(stream.token_ids)] = torch.from_numpy(stream.token_ids)
        mask[row, : len(stream.loss_mask)] = torch.from_numpy(stream.loss_mask)
    return ids, mask


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets main/ and sub/")
    parser.add_argument("--role", choices=["main", "sub"], help="only this policy")
    arguments = parser.parse_args()
    recipe = Recipe()
    roles: tuple[Role, ...] = ("main", "sub")
    for role in roles:
        if arguments.role not in (None, role):
            continue
        losses = build_policy(role, recipe, arguments.out / role)
        print(role, {name: round(value, 4) for name, value in losses.items()})


if __name__ == "__main__":
    main()
