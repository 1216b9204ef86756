import asyncio
import json
from collections.abc import Callable, Iterator
from importlib import resources

import numpy as np
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from infra.datasets.geo_facts import attribute_of, countries, facts, questions
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
from infra.quickstart.tokenizers import build_tokenizer
from infra.quickstart.warm_start import Encoder
from infra.tools.registry import build_tool
from mgrpo_core.dialogue.actions import Answer, Delegation, Menu, ToolCall, parse_action
from mgrpo_core.dialogue.template import ToolSignature
from mgrpo_core.rollout.agents import AgentSpec, Limits, Team
from mgrpo_core.rollout.scripted import ScriptedPolicy, ScriptedRequest, ScriptedTool
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.seeds import rng_of
from mgrpo_core.trajectories import Query, Rollout

_MARKUP = ('<tool_call>{"name": "searcher", "arguments": {"task": "', '"}}</tool_call>', "<answer>", "</answer>")


def _draws(role: str, habits: Habits, count: int, seed: int = 0) -> list[Demonstration]:
    demonstrator = Demonstrator(rng_of("demonstrations", seed), worlds=2)
    draw = demonstrator.main if role == "main" else demonstrator.sub
    return [draw(habits) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    drawn = [*_draws("main", MIXED, 300), *_draws("sub", MIXED, 300)]
    texts = [text for one in drawn for text in (one.system, one.user, *one.turns, *one.replies)]
    return build_tokenizer(texts, _MARKUP, 800)


def _menu(role: str) -> Menu:
    tool = build_tool("search:geo_facts")
    if role == "main":
        return Menu(delegates=["searcher"])
    return Menu([ToolSignature(tool.name, tool.description, tool.parameters)])


@pytest.mark.parametrize("role", ["main", "sub"])
@pytest.mark.parametrize("habits", [GOOD, MIXED], ids=["good", "mixed"])
def test_every_turn_is_a_legal_action_and_only_the_last_is_an_answer(role: str, habits: Habits) -> None:
    menu = _menu(role)
    for one in _draws(role, habits, 300):
        actions = [parse_action(turn, menu) for turn in one.turns]
        assert isinstance(actions[-1], Answer)
        assert all(isinstance(action, Delegation | ToolCall) for action in actions[:-1])
        assert len(one.replies) == len(one.turns) - 1


def test_a_good_main_copies_question_to_task_and_report_to_task_and_answer() -> None:
    menu = _menu("main")
    two_hops = [one for one in _draws("main", GOOD, 300) if len(one.turns) == 3]
    assert len(two_hops) > 200
    for one in two_hops:
        first, second, answer = (parse_action(turn, menu) for turn in one.turns)
        assert isinstance(first, Delegation)
        assert isinstance(second, Delegation)
        assert isinstance(answer, Answer)
        # "country with capital Lima": what follows the kind stands in the question.
        assert first.task.split(maxsplit=3)[3] in one.user
        assert second.task.endswith(f" of {one.replies[0]}")
        assert answer.text == one.replies[1]


def test_a_good_searcher_reports_what_the_document_of_its_task_says() -> None:
    for one in _draws("sub", GOOD, 300):
        answer = parse_action(one.turns[-1], _menu("sub"))
        assert isinstance(answer, Answer)
        said = dict(line.removeprefix("- ").split(": ") for line in one.replies[0].split("\n"))
        assert answer.text == said.get(one.user, "unknown")


def test_the_tasks_of_real_questions_are_of_a_form_that_demonstrations_have() -> None:
    # Relations and kinds, without the names: a form that was never shown could not be learned.
    def form(key: str) -> str:
        return key.partition(" of ")[0] if " of " in key and " with " not in key else " ".join(key.split()[:3])

    shown = {form(one.user) for one in _draws("sub", GOOD, 600)}
    asked = {form(key) for query in questions("train") for key in _facts_of(query)}
    assert asked <= shown


def test_names_are_paired_at_random_so_that_no_fact_leaks() -> None:
    true_currency = {attribute_of("currency", one.name): dict(one.attributes)["currency"][0] for one in countries()}
    shown = [
        line.removeprefix("- ").split(": ")
        for one in _draws("sub", GOOD, 2000)
        for text in one.replies
        for line in text.split("\n")
        if line.startswith("- currency of ")
    ]
    assert len(shown) > 300
    right = sum(true_currency[key] == value for key, value in shown)
    # Values are drawn evenly from about 100 currencies; a leak would make most of the lines right.
    assert right / len(shown) < 0.06


def test_every_name_of_the_corpus_can_occur() -> None:
    names = real_names()
    every = {*names.countries, *names.capitals, *names.cities}.union(*names.values.values())
    assert {fact.value for fact in facts()} <= every


@pytest.mark.parametrize("role", ["main", "sub"])
def test_a_seed_gives_the_same_dialogues_and_another_seed_gives_others(role: str) -> None:
    assert _draws(role, MIXED, 50) == _draws(role, MIXED, 50)
    assert _draws(role, MIXED, 50) != _draws(role, MIXED, 50, seed=1)


def test_mixed_habits_leave_each_agent_both_ways() -> None:
    main, sub = _draws("main", MIXED, 1000), _draws("sub", MIXED, 1000)
    at_once = sum(len(one.turns) == 1 for one in main) / 1000
    whole = sum(len(one.turns) == 3 for one in main) / 1000
    unsearched = sum(not one.replies for one in sub) / 1000
    for share in (at_once, whole, unsearched):
        assert 0.1 < share < 0.7


def test_the_preset_gives_the_agents_the_prompts_that_they_were_shown() -> None:
    preset = yaml.safe_load(resources.files("flows.presets").joinpath("quickstart.yaml").read_text(encoding="utf-8"))
    prompts = {name: agent["prompt"] for name, agent in preset["agents"].items()}
    assert prompts == {"main": MAIN_PROMPT, "searcher": SUB_PROMPT}


def test_a_main_dialogue_has_the_very_tokens_that_a_rollout_records(tokenizer: PreTrainedTokenizerFast) -> None:
    encode = Encoder(tokenizer)
    for one in _draws("main", MIXED, 12):
        recorded = _rolled_out(tokenizer, one, role="main").trajectories[0]
        demonstrated = encode(one)
        np.testing.assert_array_equal(demonstrated.token_ids, recorded.token_ids)
        np.testing.assert_array_equal(demonstrated.loss_mask, recorded.loss_mask)


def test_a_searchers_dialogue_has_the_very_tokens_that_a_rollout_records(tokenizer: PreTrainedTokenizerFast) -> None:
    encode = Encoder(tokenizer)
    for one in _draws("sub", MIXED, 12):
        recorded = _rolled_out(tokenizer, one, role="sub").trajectories[1]
        demonstrated = encode(one)
        np.testing.assert_array_equal(demonstrated.token_ids, recorded.token_ids)
        np.testing.assert_array_equal(demonstrated.loss_mask, recorded.loss_mask)


def _rolled_out(tokenizer: PreTrainedTokenizerFast, one: Demonstration, *, role: str) -> Rollout:
    """A real rollout in which one agent says what was demonstrated, and the other side replies as it was."""
    delegate = f'<tool_call>{{"name": "searcher", "arguments": {{"task": "{one.user}"}}}}</tool_call>'
    main_says = list(one.turns) if role == "main" else [delegate, "<answer>done</answer>"]
    replies = iter(one.replies)

    def searcher(request: ScriptedRequest) -> str:
        if role == "main":
            return f"<answer>{next(replies)}</answer>"
        return one.turns[request.turn]

    team = Team(
        "main",
        {
            "main": AgentSpec("main", "main", MAIN_PROMPT, delegates=("searcher",), limits=Limits(max_turn_tokens=400)),
            "searcher": AgentSpec(
                "searcher",
                "sub",
                SUB_PROMPT,
                tools=(ScriptedTool("search", _next_of(replies)),),
                limits=Limits(max_turn_tokens=400),
            ),
        },
    )
    stages = RolloutStages(
        team,
        RolloutPlan("run", 0, 0, rollouts_per_query=1),
        clients={
            "main": ScriptedPolicy("main", tokenizer, lambda request: main_says[request.turn]),  # type: ignore[arg-type]
            "sub": ScriptedPolicy("sub", tokenizer, searcher),  # type: ignore[arg-type]
        },
        tokenizers={"main": tokenizer, "sub": tokenizer},  # type: ignore[dict-item]
    )
    made: list[Rollout] = []

    async def keep(query: Query, rollouts: tuple[Rollout, ...]) -> None:
        made.extend(rollouts)

    asked = one.user if role == "main" else "Ask."
    asyncio.run(stages.run([Query("q", asked, ("a",))], keep))
    return made[0]


def _next_of(replies: Iterator[str]) -> Callable[..., str]:
    return lambda arguments: next(replies)


def _facts_of(query: Query) -> list[str]:
    return json.loads(query.metadata_json)["facts"]
