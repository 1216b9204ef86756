"""Query sources: JSONL files, and the questions that mgrpo builds itself."""

import json
from typing import Any

import fsspec

from infra.datasets.geo_facts import questions
from mgrpo_core.errors import DatasetError
from mgrpo_core.trajectories import Query

_BUILT = {"geo_facts:train": "train", "geo_facts:held_out": "held_out"}
_EXPECTED = '{"id": "q1", "question": "…", "answer": "…"}, or "answers": ["…", "…"]'


def load_queries(source: str) -> tuple[Query, ...]:
    """All queries of a source.

    Args:
        source: `geo_facts:train`, `geo_facts:held_out`, or the path or fsspec URL of a JSONL file: one object a line
            with `question`, `answer` or `answers`, and optionally `id` (default: the line's number) and anything else,
            which is kept as metadata. Blank lines are skipped.

    Raises:
        DatasetError: unreadable, empty, or a line is malformed; names the line.
    """
    if source in _BUILT:
        return questions(_BUILT[source])
    try:
        with fsspec.open(source, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        built = ", ".join(_BUILT)
        raise DatasetError(
            f"{source}: cannot be read ({error}). Give a JSONL file of UTF-8 text, or one of {built}."
        ) from error
    queries = [_query(source, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not queries:
        raise DatasetError(f"{source}: holds no query. Expected one a line: {_EXPECTED}.")
    seen: dict[str, int] = {}
    for number, query in queries:
        if query.query_id in seen:
            raise DatasetError(
                f"{source}, line {number}: id {query.query_id!r} is that of line {seen[query.query_id]} already. "
                "Groups are formed by id; give each query its own."
            )
        seen[query.query_id] = number
    return tuple(query for _, query in queries)


def _query(source: str, number: int, line: str) -> tuple[int, Query]:
    where = f"{source}, line {number}"
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: is not JSON ({error}). Expected {_EXPECTED}.") from error
    if not isinstance(raw, dict):
        raise DatasetError(f"{where}: is {type(raw).__name__}, expected an object: {_EXPECTED}.")
    question = raw.pop("question", None)
    if not isinstance(question, str) or not question.strip():
        raise DatasetError(f"{where}: question is {question!r}, expected text. Expected {_EXPECTED}.")
    answers = _answers(where, raw)
    query_id = raw.pop("id", f"line {number}")
    if not isinstance(query_id, (str, int)) or isinstance(query_id, bool) or query_id == "":
        raise DatasetError(f"{where}: id is {query_id!r}, expected text or an integer.")
    metadata = json.dumps(raw, ensure_ascii=False, sort_keys=True)
    return number, Query(str(query_id), question, answers, metadata)


def _answers(where: str, raw: dict[str, Any]) -> tuple[str, ...]:
    if ("answer" in raw) == ("answers" in raw):
        raise DatasetError(f"{where}: give either answer or answers. Expected {_EXPECTED}.")
    given = raw.pop("answers") if "answers" in raw else [raw.pop("answer")]
    texts = isinstance(given, list) and all(
        isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in given
    )
    if not texts or not given or any(not str(one).strip() for one in given):
        raise DatasetError(
            f"{where}: the reference answer is {given!r}, expected non-empty text or a number, or a list of them."
        )
    return tuple(str(one) for one in given)
