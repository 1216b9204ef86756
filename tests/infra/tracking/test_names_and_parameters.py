import posixpath
import re

from hypothesis import given
from hypothesis import strategies as st

from infra.tracking.legal_names import legal_name
from infra.tracking.parameters import LONGEST_VALUE, canonical_json, canonical_text, flat_parameters

# few letters, so that hypothesis finds names that could meet
_NAMES = st.text(alphabet="a./:@_2e ~é", max_size=8) | st.text(max_size=400)


@given(st.lists(_NAMES, unique=True, max_size=30))
def test_every_name_gets_a_legal_one_of_its_own(names: list[str]) -> None:
    legal = [legal_name(name) for name in names]
    assert len(set(legal)) == len(names)
    for name in legal:
        # mlflow.utils.validation: characters, length, and paths that normalise to something else
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name)
        path = posixpath.normpath(name)
        assert path == name
        assert path != "."
        assert not path.startswith(("..", "/"))


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("reward/main/mean", "time-roll_out.s", "clip 0.2"):
        assert legal_name(name) == name
    assert legal_name("reward/mean@4") == "reward/mean:40:4"


def test_two_long_names_that_differ_at_the_end_stay_two() -> None:
    assert legal_name("x" * 251) != legal_name("x" * 250 + "y")


def test_equal_values_have_one_spelling() -> None:
    # case G3
    assert canonical_text(1e-06) == canonical_text(0.000001) == "1e-06"
    assert canonical_text((1, 2)) == canonical_text([1, 2.0]) == "[1, 2]"
    assert canonical_text(1) == canonical_text(1.0) == "1"
    assert (canonical_text(None), canonical_text(True), canonical_text("None")) == ("null", "true", "None")
    assert canonical_text(0.1) != canonical_text(0.1 + 1e-16 * 2)


def test_nested_sections_become_dotted_keys_and_no_two_meet() -> None:
    config = {"a": {"b": 1, "c": {}}, "a.b": 2, "list": [{"x": 1.0}]}
    assert flat_parameters(config) == {"a.b": "1", "a.c": "{}", "a\\.b": "2", "list": '[{"x": 1}]'}


def test_a_long_value_is_cut_visibly_and_differs_where_the_value_does() -> None:
    # case G2
    first, second = canonical_text("x" * 6000 + "a"), canonical_text("x" * 6000 + "b")
    assert first != second
    assert "… sha256:" in first
    assert max(len(first), len(second)) <= LONGEST_VALUE


def test_the_whole_config_reads_the_same_whatever_the_order_and_spelling() -> None:
    assert canonical_json({"b": (1.0,), "a": 1e-06}) == canonical_json({"a": 0.000001, "b": [1]})
