"""What a policy's turn asks for. One strict parser, for the controller and for the format reward."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jsonschema.exceptions
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from mgrpo_core.dialogue.strict_json import Member, StrictJSONError, object_members
from mgrpo_core.dialogue.template import ToolSignature
from mgrpo_core.errors import ConfigError

DELEGATION_SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "task": {"type": "string", "pattern": "\\S", "description": "What to do."},
        "context": {"type": "string", "description": "What it needs to know beside the task."},
    },
    "required": ["task"],
    "additionalProperties": False,
}
"""JSON schema of the arguments of a delegation."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call a tool. `arguments` match its schema; `arguments_json` is what the policy wrote."""

    name: str
    arguments: Mapping[str, object]
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Delegation:
    """Ask a sub-agent. `context` is None where the policy gave none."""

    agent: str
    task: str
    context: str | None
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The agent's reply, stripped, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """No action. `error` is told to the policy; name and arguments as far as they could be read."""

    error: str
    name: str | None = None
    arguments_json: str | None = None


Action = ToolCall | Delegation | Answer | Invalid

_TAG = re.compile(r"</?(?:think|tool_call|tool_response|answer)>")
_ACTION = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)


class _RefusedError(ValueError):
    """The turn is no action; the message is for the policy."""


class Menu:
    """What an agent may call: its tools and the agents it may delegate to, with the schemas of their arguments."""

    def __init__(self, tools: Sequence[ToolSignature] = (), delegates: Sequence[str] = ()) -> None:
        """Raises: ConfigError if two entries share a name, or a tool's schema is none or refers outside itself."""
        names = [tool.name for tool in tools] + list(delegates)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"tools and delegates: {', '.join(twice)} stands for two of them. Give each its own name."
            )
        self.names = tuple(names)
        self.delegates = frozenset(delegates)
        self._validators: dict[str, Draft202012Validator] = {}
        for tool in tools:
            try:
                # With the format checker: a `pattern` that is no regular expression would raise at the first call.
                Draft202012Validator.check_schema(
                    dict(tool.parameters), format_checker=Draft202012Validator.FORMAT_CHECKER
                )
            except jsonschema.exceptions.SchemaError as error:
                raise ConfigError(
                    f"tool {tool.name}: its parameters are no JSON schema (draft 2020-12): {error.message}. "
                    "Correct `parameters`."
                ) from error
            for reference in _broken_references(tool.parameters):
                raise ConfigError(
                    f"tool {tool.name}: its parameters refer to {reference!r}, which is not in them. A rollout fetches "
                    "no schema; move it into `$defs` and refer to `#/$defs/...`."
                )
            self._validators[tool.name] = _validator(tool.parameters)
        for name in delegates:
            self._validators[name] = _validator(DELEGATION_SCHEMA)

    def check(self, name: str, arguments: Mapping[str, object]) -> str | None:
        """What is wrong with these arguments for `name`, or None."""
        # Typed loosely: jsonschema's own annotations are partial.
        errors = cast("Any", self._validators[name]).iter_errors(arguments)
        worst = cast("Any", jsonschema.exceptions).best_match(errors)
        if worst is None:
            return None
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in worst.absolute_path)
        return f"arguments{place}: {str(worst.message)[:200]}"


def parse_action(text: str, menu: Menu) -> Action:
    r"""Read the one action of a turn.

    Grammar, white space between the parts aside:
        turn   := [ "<think>" any "</think>" ] action
        action := "<tool_call>" {"name": one of the menu, "arguments": {...}} "</tool_call>"
                | "<answer>" text without markup, not blank "</answer>"

    Nothing may stand outside, nothing after the action; "<tool_response>" may stand nowhere. The JSON has exactly these
    two keys, no key twice, no NaN or Infinity, no lone surrogate, and its arguments match the schema. A name that is
    not on the menu is an error that lists the menu; nothing is guessed.

    Args:
        text: the turn without its final stop token, with "<think>" in front where the template had opened it.
        menu: what the agent may call.
    """
    try:
        body = _after_thinking(text)
        kind, inner = _only_action(body)
        if kind == "answer":
            return _answer(inner)
    except _RefusedError as refusal:
        return Invalid(str(refusal))
    return _call(inner, menu)


def _after_thinking(text: str) -> str:
    if "<tool_response>" in text or "</tool_response>" in text:
        raise _RefusedError("Only tools write <tool_response>. Call a tool or answer.")
    text = text.strip()
    if not text.startswith("<think>"):
        return text
    thought, closed, body = text.removeprefix("<think>").partition("</think>")
    if not closed:
        raise _RefusedError("<think> is not closed.")
    if "<think>" in thought:
        raise _RefusedError("<think> inside <think>.")
    return body.strip()


def _only_action(body: str) -> tuple[str, str]:
    expected = 'Expected one <tool_call>{"name": ..., "arguments": {...}}</tool_call> or one <answer>...</answer>'
    if not body:
        raise _RefusedError(f"No action. {expected}.")
    match = _ACTION.match(body)
    if match is None:
        for tag in ("tool_call", "answer"):
            if body.startswith(f"<{tag}>"):
                raise _RefusedError(f"<{tag}> is not closed.")
        raise _RefusedError(f"Text outside the markup. {expected}, after an optional <think>...</think>.")
    if match.end() != len(body):
        raise _RefusedError(f"Something follows </{match.group(1)}>. One action a turn, and nothing after it.")
    return match.group(1), match.group(2)


def _answer(inner: str) -> Answer:
    markup = _TAG.search(inner)
    if markup:
        raise _RefusedError(f"{markup.group()} inside <answer>.")
    if not inner.strip():
        raise _RefusedError("<answer> is empty.")
    return Answer(inner.strip())


def _call(inner: str, menu: Menu) -> Action:
    try:
        members = object_members(inner)
    except StrictJSONError as error:
        return Invalid(f"<tool_call> is no valid JSON object: {error}.")
    named, given = members.get("name"), members.get("arguments")
    name = named.value if named is not None and isinstance(named.value, str) else None
    try:
        return _checked_call(members, name, given, menu)
    except _RefusedError as refusal:
        return Invalid(str(refusal), name, given.source if given is not None else None)


def _checked_call(members: Mapping[str, Member], name: str | None, given: Member | None, menu: Menu) -> Action:
    unexpected = sorted(members.keys() - {"name", "arguments"})
    if unexpected:
        raise _RefusedError(
            f'Unexpected key "{unexpected[0][:64]}" in <tool_call>. Its keys are "name" and "arguments".'
        )
    if name is None:
        raise _RefusedError('<tool_call> lacks "name", a string.')
    if name not in menu.names:
        raise _RefusedError(f'Unknown name "{name[:64]}". Known: {", ".join(menu.names) or "none, so answer"}.')
    arguments = _as_object(given)
    if given is None or arguments is None:
        raise _RefusedError('<tool_call> lacks "arguments", an object.')
    wrong = menu.check(name, arguments)
    if wrong:
        raise _RefusedError(f"{name}: {wrong}.")
    if name in menu.delegates:
        context = arguments.get("context")
        return Delegation(name, str(arguments["task"]), None if context is None else str(context), given.source)
    return ToolCall(name, arguments, given.source)


def _as_object(given: Member | None) -> dict[str, object] | None:
    value = given.value if given is not None else None
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _broken_references(schema: Mapping[str, object]) -> Iterator[str]:
    resource = cast("Any", DRAFT202012).create_resource(dict(schema))
    resolver = cast("Any", Registry)().with_resource("", resource).resolver("")
    left: list[object] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            reference = cast("Mapping[str, object]", node).get("$ref")
            if isinstance(reference, str):
                try:
                    resolver.lookup(reference)
                except (Unresolvable, ValueError):
                    yield reference
            left.extend(cast("Mapping[str, object]", node).values())
        elif isinstance(node, list):
            left.extend(cast("list[object]", node))


def _validator(schema: Mapping[str, object]) -> Draft202012Validator:
    # An empty registry: a schema that points elsewhere must not make a rollout reach into the network.
    return Draft202012Validator(dict(schema), registry=Registry())
