import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.quickstart.builtin import builtin_policy
from infra.quickstart.warm_start import Recipe, Role, mix_habits, train_skills
from infra.training.load_policy import load_policy

TINY = Recipe(
    vocabulary=900, hidden=64, layers=2, batch=16, skill_steps=40, sub_skill_steps=40, habit_steps=2, dialogues=160
)


@pytest.mark.parametrize("role", ["main", "sub"])
def test_forty_steps_teach_more_than_chance_and_the_result_is_a_policy(role: Role, tmp_path: Path) -> None:
    # An untrained policy loses ln(vocabulary) a token: ln 900 = 6.8.
    assert train_skills(role, TINY, tmp_path / "skills", show=False) < 0.7 * math.log(900)
    assert math.isfinite(mix_habits(role, TINY, tmp_path / "skills", tmp_path / "out", show=False))
    model, tokenizer = load_policy(tmp_path / "out", torch.float32)
    assert tokenizer.chat_template
    assert model.config.head_dim == 32
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["sha256"] == TINY.sha256()


def test_the_same_recipe_builds_the_same_weights(tmp_path: Path) -> None:
    short = replace(TINY, skill_steps=2, habit_steps=1, dialogues=32)
    for name in "ab":
        train_skills("main", short, tmp_path / name, show=False)
    a, b = (tmp_path / name / "model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("role", ["main", "sub"])
def test_the_shipped_policies_came_out_of_the_recipe_as_it_stands(role: Role) -> None:
    recorded = json.loads((builtin_policy(f"builtin:quickstart/{role}") / "recipe.json").read_text(encoding="utf-8"))
    assert recorded["sha256"] == Recipe().sha256()
