"""JSON objects as the standard has them, with the source of each member: nothing repaired, nothing guessed."""

import json
import math
import re
from dataclasses import dataclass
from typing import cast

_SPACE = re.compile(r"[ \t\r\n]*")


class StrictJSONError(ValueError):
    """The text is no JSON object. The message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A value of an object, and the text it was read from."""

    value: object
    source: str


def object_members(text: str) -> dict[str, Member]:
    """The members of the one JSON object that `text` is.

    Raises: StrictJSONError on anything else: trailing data, a key twice at any level, NaN, Infinity or a number that a
        float cannot hold, a lone surrogate, nesting beyond the interpreter's limit.
    """
    try:
        members = _scan(text)
        json.dumps({key: member.value for key, member in members.items()}, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise StrictJSONError("a lone surrogate") from error
    except RecursionError as error:
        raise StrictJSONError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise StrictJSONError(f"{error.msg} at character {error.pos}") from error
    except StrictJSONError:
        raise
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise StrictJSONError("a number that is too long") from error
    return members


def _scan(text: str) -> dict[str, Member]:
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    def expect(char: str, at: int) -> int:
        if text[at : at + 1] != char:
            raise json.JSONDecodeError(f"expected {char!r}", text, at)
        return skip(at + 1)

    def value_at(at: int) -> tuple[object, int]:
        return cast("tuple[object, int]", decoder.raw_decode(text, at))

    members: dict[str, Member] = {}
    at = expect("{", skip(0))
    if text[at : at + 1] == "}":
        at = skip(at + 1)
    else:
        while True:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("expected a key in double quotes", text, at)
            key, end = value_at(at)
            start = expect(":", skip(end))
            value, end = value_at(start)
            if str(key) in members:
                raise StrictJSONError(f'key "{key}" twice')
            members[str(key)] = Member(value, text[start:end])
            at = skip(end)
            if text[at : at + 1] != ",":
                break
            at = skip(at + 1)
        at = expect("}", at)
    if at != len(text):
        raise json.JSONDecodeError("something after the object", text, at)
    return members


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise StrictJSONError(f'key "{key}" twice')
        made[key] = value
    return made


def _no_constant(name: str) -> float:
    raise StrictJSONError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise StrictJSONError(f"{digits[:20]} is too large")
    return value
