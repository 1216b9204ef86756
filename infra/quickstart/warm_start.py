"""Builds the quickstart's two policies from nothing:
`python -m infra.quickstart.warm_start --skills DIR --out DIR`.

Skills first, on made-up facts; then a mix of good and bad habits (see `demonstrations`). What is shipped beside this
file came out of it with the default settings.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

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
from infra.quickstart.tokenizers import END_OF_TURN, PADDING, build_tokenizer
from infra.training.load_policy import load_policy
from infra.training.no_progress_bar import no_progress_bar
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
        """Of the recipe, the habits and the names, recorded beside the weights."""
        text = json.dumps([asdict(self), asdict(GOOD), asdict(MIXED), asdict(real_names())], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def train_skills(role: Role, recipe: Recipe, out: Path, *, show: bool = True) -> float:
    """Train one policy from nothing on good habits only, float32; returns its last loss, nats a token."""
    torch.manual_seed(seed_of(recipe.seed, "warm start", role))
    rng = rng_of(recipe.seed, "warm start", role)
    demonstrator = Demonstrator(rng)
    tokenizer = _tokenizer(role, demonstrator, recipe)
    model = Qwen3ForCausalLM(_config(tokenizer, recipe))
    model.train()
    steps = recipe.skill_steps if role == "main" else recipe.sub_skill_steps
    pool = _dialogues(role, demonstrator, tokenizer, GOOD, min(recipe.dialogues, steps * recipe.batch), show)
    loss = _train(model, pool, steps, recipe.lr, recipe.batch, rng, f"{role}: skills", show)
    _save(model, tokenizer, out)
    return loss


def mix_habits(role: Role, recipe: Recipe, skills: Path, out: Path, *, show: bool = True) -> float:
    """Mix good and bad habits into a skilled policy, and save it as it is shipped: float16, half the size."""
    rng = rng_of(recipe.seed, "habits", role)
    model, tokenizer = load_policy(skills, torch.float32)
    model.train()
    pool = _dialogues(role, Demonstrator(rng), tokenizer, MIXED, recipe.habit_steps * recipe.batch, show)
    loss = _train(model, pool, recipe.habit_steps, recipe.habit_lr, recipe.batch, rng, f"{role}: habits", show)
    _save(model.half(), tokenizer, out)
    record = {"sha256": recipe.sha256(), "role": role, "last_loss": round(loss, 4), **asdict(recipe)}
    (out / "recipe.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return loss


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


def _dialogues(
    role: Role, demonstrator: Demonstrator, tokenizer: Any, habits: Habits, count: int, show: bool
) -> list[TokenStream]:
    draw = demonstrator.main if role == "main" else demonstrator.sub
    encode = Encoder(tokenizer)
    return [encode(draw(habits)) for _ in track(range(count), f"{role}: dialogues", disable=not show)]


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with no_progress_bar():
        model.eval().save_pretrained(out)
        tokenizer.save_pretrained(out)


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
        pad_token_id=cast("int", tokenizer.convert_tokens_to_ids(PADDING)),
        bos_token_id=None,
    )


def _train(
    model: Any,
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
    parser.add_argument("--skills", type=Path, required=True, help="folder for the skilled policies in between; kept")
    arguments = parser.parse_args()
    recipe = Recipe()
    roles: tuple[Role, ...] = ("main", "sub")
    for role in roles:
        if not (arguments.skills / role / "model.safetensors").exists():
            print(f"{role}: skills, loss {train_skills(role, recipe, arguments.skills / role):.4f}")
        print(f"{role}: habits, loss {mix_habits(role, recipe, arguments.skills / role, arguments.out / role):.4f}")


if __name__ == "__main__":
    main()
