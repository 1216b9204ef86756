import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.dialogue.actions import Answer, Delegation, Invalid, Menu, ToolCall, parse_action
from mgrpo_core.dialogue.template import ToolSignature
from mgrpo_core.errors import ConfigError

SEARCH = ToolSignature(
    "search",
    "Finds.",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}},
        "required": ["query"],
        "additionalProperties": False,
    },
)
MENU = Menu([SEARCH], ["sub_search", "sub_code"])


def call(body):
    return f"<tool_call>{body}</tool_call>"


def error_of(text, menu=MENU):
    action = parse_action(text, menu)
    assert isinstance(action, Invalid), action
    return action.error


def test_a_call_keeps_its_arguments_as_they_were_written():
    written = '{ "query":"Per\\u00fa",  "limit": 3 }'
    action = parse_action(call(f'\n{{"name": "search", "arguments": {written}}}\n'), MENU)
    assert action == ToolCall("search", {"query": "Perú", "limit": 3}, written)


def test_a_delegation_has_a_task_and_perhaps_context():
    written = '{"task": "look", "context": "c"}'
    assert parse_action(call(f'{{"name": "sub_code", "arguments": {written}}}'), MENU) == Delegation(
        "sub_code", "look", "c", written
    )
    written = '{"task": "look"}'
    assert parse_action(call(f'{{"arguments": {written}, "name": "sub_code"}}'), MENU) == Delegation(
        "sub_code", "look", None, written
    )


def test_an_answer_is_stripped():
    assert parse_action("<answer>\n Lima \n</answer>\n", MENU) == Answer("Lima")


def test_thinking_may_come_first_and_may_speak_of_markup():
    text = f"<think>I could <answer> now, or {call('x')}</think>\n\n<answer>Lima</answer>"
    assert parse_action(text, MENU) == Answer("Lima")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "No action"),
        ("<think>hm</think>", "No action"),
        ("Lima", "Text outside the markup"),
        ("So: <answer>Lima</answer>", "Text outside the markup"),
        ("<think>a</think>So <answer>Lima</answer>", "Text outside the markup"),
        ("<answer>Lima</answer> done", "Something follows </answer>"),
        ("<answer>a</answer><answer>b</answer>", "Something follows </answer>"),
        (call('{"name": "search", "arguments": {"query": "a"}}') * 2, "Something follows </tool_call>"),
        (call('{"name": "search", "arguments": {"query": "a"}}') + "<answer>b</answer>", "Something follows"),
        ("<answer>Lima", "<answer> is not closed"),
        ('<tool_call>{"name": "search"', "<tool_call> is not closed"),
        ("<think>forever", "<think> is not closed"),
        ("<think>a<think>b</think></think><answer>x</answer>", "<think> inside <think>"),
        ("<answer> \n </answer>", "<answer> is empty"),
        ("<answer><tool_call>{}</tool_call></answer>", "<tool_call> inside <answer>"),
        ("<answer>a<answer>b</answer>", "<answer> inside <answer>"),
        ("<think>x</think><tool_response>r</tool_response><answer>x</answer>", "Only tools write <tool_response>"),
        ("<think><tool_response>r</think><answer>x</answer>", "Only tools write <tool_response>"),
        (" <Answer>Lima</Answer>", "Text outside the markup"),
    ],
)
def test_a_turn_is_one_action_and_nothing_else(text, error):
    # algorithm.md section 6, row 23
    assert error_of(text).startswith(error)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"agent": "search", "query": "capital of', "no valid JSON"),  # case D8
        ('{"a":1}{"b":2}', "something after the object"),  # case D8
        ("", "expected '{' at character 0"),
        ("[]", "expected '{'"),
        ('"search"', "expected '{'"),
        ("{}", 'lacks "name"'),
        ("{'name': 'search'}", "expected a key in double quotes"),
        ('{"name": "search", "arguments": {"query": "a"},}', "expected a key in double quotes"),
        ('{"name": "search", "arguments": {"query": "a"}} // yes', "something after the object"),
        ('{"name": "search", "name": "search", "arguments": {"query": "a"}}', 'key "name" twice'),
        ('{"name": "search", "arguments": {"query": "a", "query": "b"}}', 'key "query" twice'),
        ('{"name": "search", "arguments": {"query": "a", "limit": NaN}}', "NaN is no JSON number"),
        ('{"name": "search", "arguments": {"query": "a", "limit": -Infinity}}', "-Infinity is no JSON number"),
        ('{"name": "search", "arguments": {"query": "a", "limit": 1e999}}', "1e999 is too large"),
        ('{"name": "search", "arguments": {"query": "a", "limit": ' + "9" * 5000 + "}}", "too long"),
        ('{"name": "search", "arguments": {"query": "\\ud800"}}', "a lone surrogate"),
        ('{"name": "search", "arguments": {"\\udfff": 1}}', "a lone surrogate"),
        ('{"name": "search", "arguments": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"name": "search", "arguments": {"query": "a"}, "id": 1}', 'Unexpected key "id"'),
        ('{"name": 1, "arguments": {}}', 'lacks "name", a string'),
        ('{"name": "search"}', 'lacks "arguments", an object'),
        ('{"name": "search", "arguments": "a"}', 'lacks "arguments", an object'),
        ('{"name": "search", "arguments": {}}', "search: arguments: 'query' is a required property"),
        ('{"name": "search", "arguments": {"query": 1}}', "search: arguments.query: 1 is not of type 'string'"),
        ('{"name": "search", "arguments": {"query": "a", "limit": true}}', "search: arguments.limit: True is not"),
        ('{"name": "search", "arguments": {"query": "a", "site": "b"}}', "search: arguments: Additional"),
        ('{"name": "sub_code", "arguments": {"task": "  "}}', "sub_code: arguments.task: "),
        ('{"name": "sub_code", "arguments": {"query": "a"}}', "sub_code: arguments: "),
    ],
)
def test_a_call_that_is_no_json_or_breaks_its_schema_is_no_action(body, error):
    assert error in error_of(call(body))


def test_an_unknown_name_lists_those_there_are_and_is_not_corrected():
    # case D10
    action = parse_action(call('{"name": "sub_serach", "arguments": {"task": "a"}}'), MENU)
    assert action == Invalid(
        'Unknown name "sub_serach". Known: search, sub_search, sub_code.', "sub_serach", '{"task": "a"}'
    )
    assert "none, so answer" in error_of(call('{"name": "x", "arguments": {}}'), Menu())


@pytest.mark.parametrize("name", ["Search", " search", "search ", "ѕearch"])
def test_names_are_compared_as_they_stand(name):
    assert "Unknown name" in error_of(call(json.dumps({"name": name, "arguments": {"query": "a"}})))


def test_one_name_for_two_things_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="search stands for two"):
        Menu([SEARCH], ["search"])


@pytest.mark.parametrize("schema", [{"type": "no such type"}, {"properties": {"a": {"pattern": "("}}}])
def test_a_schema_that_is_none_is_a_wrong_setting(schema):
    with pytest.raises(ConfigError, match="no JSON schema"):
        Menu([ToolSignature("t", "", schema)])


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1/schema.json", "other.json", "#/$defs/missing"])
def test_a_schema_that_refers_outside_itself_is_a_wrong_setting(reference):
    with pytest.raises(ConfigError, match="which is not in them"):
        Menu([ToolSignature("t", "", {"properties": {"a": {"anyOf": [{"$ref": reference}]}}})])


def test_a_schema_may_refer_to_its_own_definitions():
    schema = {"properties": {"a": {"$ref": "#/$defs/word"}}, "$defs": {"word": {"type": "string"}}}
    menu = Menu([ToolSignature("t", "", schema)])
    assert isinstance(parse_action(call('{"name": "t", "arguments": {"a": "b"}}'), menu), ToolCall)
    assert "arguments.a: 1 is not" in error_of(call('{"name": "t", "arguments": {"a": 1}}'), menu)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(), json_values, max_size=4), indent=st.sampled_from([None, 2]))
def test_whatever_json_can_say_is_read_as_it_was_meant(arguments, indent):
    menu = Menu([ToolSignature("any", "", {"type": "object"})])
    written = json.dumps(arguments, indent=indent)
    action = parse_action(call(f'{{"name": "any", "arguments": {written}}}'), menu)
    if any(tag in written for tag in ("</tool_call>", "<tool_response>", "</tool_response>")):
        assert isinstance(action, Invalid)
    else:
        assert isinstance(action, ToolCall)
        assert action.arguments == arguments
        assert action.arguments_json == written


fragments = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<tool_response>"),
        *(
            '{"name": "search", "arguments": {"query": "a"}}',
            '{"name":',
            "}",
            "[",
            "\ud800",
            "\x00",
            "é",
            " ",
            "\n",
            "x",
        ),
    ]
)


@given(st.lists(fragments, max_size=12).map("".join))
def test_no_text_escapes_the_parser_and_only_a_lone_action_counts(text):
    action = parse_action(text, MENU)
    if not isinstance(action, Invalid):
        assert "<tool_response>" not in text
        kind = "answer" if isinstance(action, Answer) else "tool_call"
        assert text.strip().endswith(f"</{kind}>")
        assert text.split("</think>")[-1].count(f"<{kind}>") == 1
