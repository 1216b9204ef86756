"""The templates of the preset `smollm`: ChatML with examples that are never taken for the dialogue."""

from typing import cast

import pytest

from infra.quickstart.builtin import builtin_policy
from infra.smollm.chat_templates import MAIN_EXAMPLES, SUB_EXAMPLES, chat_template
from infra.training.load_policy import load_tokenizer
from mgrpo_core.dialogue.actions import Answer, Delegation, Menu, parse_action
from mgrpo_core.dialogue.template import ChatTemplate, ChatTokenizer


@pytest.mark.parametrize("examples", [MAIN_EXAMPLES, SUB_EXAMPLES])
def test_the_examples_stand_between_the_system_prompt_and_the_question(examples):
    tokenizer = load_tokenizer(builtin_policy("builtin:quickstart/main"))
    tokenizer.chat_template = chat_template(examples)
    template = ChatTemplate(cast("ChatTokenizer", tokenizer))  # it refuses a template that rollouts cannot use
    said = template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
    turns = [part.split("\n", 1) for part in said.replace("<|im_end|>\n", "").split("<|im_start|>")[1:]]
    assert [tuple(turn) for turn in turns] == [("system", "S"), *examples, ("user", "Q"), ("assistant", "")]


def test_every_example_is_what_the_parser_takes_for_an_action():
    menu = Menu(delegates=["solver"])
    for role, content in MAIN_EXAMPLES:
        if role == "assistant":
            assert isinstance(parse_action(content, menu), Delegation | Answer)
    for role, content in SUB_EXAMPLES:
        if role == "assistant":
            assert isinstance(parse_action(content, Menu()), Answer)
