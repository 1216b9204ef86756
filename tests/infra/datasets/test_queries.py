import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.datasets.geo_facts import questions
from infra.datasets.queries import load_queries
from mgrpo_core.errors import DatasetError
from mgrpo_core.trajectories import Query

_GOOD = b'{"id": "a", "question": "q?", "answer": "b"}'


def _file(tmp_path: Path, *lines: bytes) -> str:
    path = tmp_path / "queries.jsonl"
    path.write_bytes(b"\n".join(lines))
    return str(path)


def test_a_line_becomes_a_query_with_everything_else_as_metadata(tmp_path: Path) -> None:
    line = b'{"id": "a", "question": "Which?", "answers": ["b", "c"], "source": "me", "hops": 2}'
    assert load_queries(_file(tmp_path, line)) == (Query("a", "Which?", ("b", "c"), '{"hops": 2, "source": "me"}'),)


def test_queries_come_in_the_order_of_the_file_and_blank_lines_count_as_lines(tmp_path: Path) -> None:
    source = _file(tmp_path, b'{"question": "q", "answer": 1}', b"", b'{"question": "r", "answer": 2.5}')
    assert [(q.query_id, q.answers) for q in load_queries(source)] == [("line 1", ("1",)), ("line 3", ("2.5",))]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_query(tmp_path: Path) -> None:
    source = _file(tmp_path, b"\xef\xbb\xbf" + _GOOD + b"\r", b"\r")
    assert load_queries(source) == (Query("a", "q?", ("b",)),)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=st.text(min_size=1).filter(str.strip), answer=st.text(min_size=1).filter(str.strip))
def test_what_is_written_as_json_lines_is_read_as_it_was(tmp_path: Path, question: str, answer: str) -> None:
    # Without escapes, so that U+2028, U+0085 and their like stand in the line as they are.
    line = json.dumps({"id": "a", "question": question, "answer": answer}, ensure_ascii=False)
    try:
        encoded = line.encode()
    except UnicodeEncodeError:
        return
    assert load_queries(_file(tmp_path, encoded, b"")) == (Query("a", question, (answer,)),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "x", "question": "q", "answer": "b"', "no JSON object"),
        (b'["x", "q", "b"]', "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"id": "x", "question": "q", "answer": ' + b"1" * 5000 + b"}", "too long"),
        (b'{"id": "x", "question": "q", "answer": NaN}', "NaN"),
        (b'{"id": "x", "id": "y", "question": "q", "answer": "b"}', '"id" twice'),
        (b'{"id": "x", "question": "\\ud800", "answer": "b"}', "lone surrogate"),
        (b'{"id": "x", "question": "caf\xe9", "answer": "b"}', "not UTF-8"),
        (b'{"id": "x", "answer": "b"}', "question is None"),
        (b'{"id": "x", "question": "  ", "answer": "b"}', "question is '  '"),
        (b'{"id": "x", "question": "q"}', "either answer or answers"),
        (b'{"id": "x", "question": "q", "answer": "b", "answers": ["b"]}', "either answer or answers"),
        (b'{"id": "x", "question": "q", "answer": null}', "answer is None"),
        (b'{"id": "x", "question": "q", "answer": true}', "answer is True"),
        (b'{"id": "x", "question": "q", "answer": ["b"]}', "answer is ['b']"),
        (b'{"id": "x", "question": "q", "answers": []}', "answers is []"),
        (b'{"id": "x", "question": "q", "answers": "b"}', "answers is 'b'"),
        (b'{"id": "x", "question": "q", "answers": ["b", " "]}', "answers is ['b', ' ']"),
        (b'{"id": null, "question": "q", "answer": "b"}', "id is None"),
        (b'{"id": "", "question": "q", "answer": "b"}', "id is ''"),
        (b'{"id": true, "question": "q", "answer": "b"}', "id is True"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line_number(tmp_path: Path, line: bytes, problem: str) -> None:
    source = _file(tmp_path, _GOOD, b"", line)
    with pytest.raises(DatasetError) as caught:
        load_queries(source)
    assert f"{source}, line 3" in str(caught.value)
    assert problem in str(caught.value)


def test_an_id_that_comes_twice_names_both_lines(tmp_path: Path) -> None:
    # 7 and "7" would be one group.
    source = _file(tmp_path, b'{"id": 7, "question": "q", "answer": 1}', b'{"id": "7", "question": "r", "answer": 2}')
    with pytest.raises(DatasetError, match=r"line 2: id '7' is that of line 1"):
        load_queries(source)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_a_file_without_a_query_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DatasetError, match="holds no query"):
        load_queries(_file(tmp_path, content))


@pytest.mark.parametrize("source", ["missing.jsonl", "nosuch://bucket/queries.jsonl", "geo_facts:test"])
def test_a_source_that_cannot_be_read_is_refused_with_what_there_is(source: str) -> None:
    with pytest.raises(DatasetError, match="geo_facts:train, geo_facts:held_out") as caught:
        load_queries(source)
    assert str(caught.value).startswith(source)


def test_a_folder_is_no_query_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        load_queries(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_questions_that_mgrpo_builds_are_sources_too(split: str) -> None:
    assert load_queries(f"geo_facts:{split}") == questions(split)
