"""Query sources: JSONL files, and the questions that mgrpo builds itself."""

import json
from collections.abc import Mapping

import fsspec

from infra.datasets.geo_facts import questions
from infra.datasets.sums import sums
from mgrpo_core.dialogue.strict_json import Member, StrictJSONError, object_members
from mgrpo_core.errors import DatasetError
from mgrpo_core.trajectories import Query

_BUILT = {
    "geo_facts:train": lambda: questions("train"),
    "geo_facts:held_out": lambda: questions("held_out"),
    "sums:train": lambda: sums("train"),
    "sums:held_out": lambda: sums("held_out"),
}
_EXPECTED = '{"id": "q1", "question": "…", "answer": "…"}, or "answers": ["…", "…"]'


def load_queries(source: str) -> tuple[Query, ...]:
    """All queries of a source.

    Args:
        source: `geo_facts:` or `sums:` and `train` or `held_out`, or the path or fsspec URL of a JSONL file: UTF-8, one
            object a line with `question`, `answer` or `answers`, and optionally `id` (default: the line's number) and
            anything else, which is kept as metadata. Blank lines are skipped; lines end at a line feed only, because
            JSON allows every other separator inside a text.

    Raises:
        DatasetError: unreadable, empty, a line is malformed, or an id comes twice; names the line.
    """
    if source in _BUILT:
        return _BUILT[source]()
    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read()  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        built = ", ".join(_BUILT)
        raise DatasetError(
            f"{source}: cannot be read ({error}). Give a JSONL file of UTF-8 text, or one of {built}."
        ) from error
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")  # editors on Windows begin a file with this mark
    seen: dict[str, int] = {}
    queries: list[Query] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        query = _query(f"{source}, line {number}", number, line)
        if query.query_id in seen:
            raise DatasetError(
                f"{source}, line {number}: id {query.query_id!r} is that of line {seen[query.query_id]} already. "
                "Groups are formed by id; give each query its own."
            )
        seen[query.query_id] = number
        queries.append(query)
    if not queries:
        raise DatasetError(f"{source}: holds no query. Expected one a line: {_EXPECTED}.")
    return tuple(queries)


def _query(where: str, number: int, line: bytes) -> Query:
    try:
        members = object_members(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: is not UTF-8 ({error}). Save the file as UTF-8.") from error
    except StrictJSONError as error:
        raise DatasetError(f"{where}: is no JSON object ({error}). Expected {_EXPECTED}.") from error
    question = members["question"].value if "question" in members else None
    if not isinstance(question, str) or not question.strip():
        raise DatasetError(f"{where}: question is {question!r}, expected text. Expected {_EXPECTED}.")
    query_id = members["id"].value if "id" in members else f"line {number}"
    if not isinstance(query_id, (str, int)) or isinstance(query_id, bool) or query_id == "":
        raise DatasetError(f"{where}: id is {query_id!r}, expected text or an integer.")
    known = ("id", "question", "answer", "answers")
    rest = {name: member.value for name, member in members.items() if name not in known}
    metadata = json.dumps(rest, ensure_ascii=False, sort_keys=True)
    return Query(str(query_id), question, _answers(where, members), metadata)


def _answers(where: str, members: Mapping[str, Member]) -> tuple[str, ...]:
    given = [name for name in ("answer", "answers") if name in members]
    if len(given) != 1:
        raise DatasetError(f"{where}: give either answer or answers. Expected {_EXPECTED}.")
    value = members[given[0]].value
    answers = value if given[0] == "answers" else [value]
    if not isinstance(answers, list) or not answers or not all(_is_answer(one) for one in answers):
        raise DatasetError(
            f"{where}: {given[0]} is {value!r}, expected non-empty text or a number"
            f"{', or a list of them' if given[0] == 'answers' else ''}."
        )
    return tuple(str(one) for one in answers)


def _is_answer(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and bool(str(value).strip())
