"""Text as people may see it: nothing in it steers, and nothing of it is lost."""

from hypothesis import given
from hypothesis import strategies as st

from infra.traces.visible import shortened, visible


@given(st.text())
def test_nothing_steers(text):
    assert all(char.isprintable() or char in "\n\t" for char in visible(text))


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_what_is_printable_stays(text):
    assert visible(text) == text


def test_what_would_steer_is_shown_as_its_escape():
    assert visible("a\x1b[31m\u202eb\x00\nc\td") == r"a\x1b[31m\u202eb\x00" + "\nc\td"


@given(st.text(), st.integers(5, 40))
def test_a_line_is_short_and_one_line(text, most):
    line = shortened(text, most)
    assert len(line) <= most
    assert line.isprintable()


def test_a_cut_is_seen():
    assert shortened("one two three", 8) == "one two…"
    assert shortened("one\n two ", 8) == "one two"
    assert shortened("x" + " " * 100, 8) == "x…"
