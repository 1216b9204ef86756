import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.component import ScoreStatus, scored
from mgrpo_core.rewards.verifiers import choice, correctness, exact_match, normalize_answer, numeric, verifier_of
from mgrpo_core.trajectories import Query


def query(*answers):
    return Query("q", "?", answers)


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("The Beatles", "beatles", True),
        ("  Lima. ", "lima", True),
        ("São Paulo", "sao paulo", False),
        ("Ａｌｐｈａ", "alpha", True),  # full-width letters are the same letters
        ("theatre", "atre", False),  # an article is a word of its own
        ("Lima, Peru", "Lima", False),
        ("the", "a", False),  # both normalise to nothing: they say nothing about each other
        ("the", "the", True),
        ("?", "!", False),
        ("", "the", False),
    ],
)
def test_exact_match_after_normalisation(answer, reference, same):
    assert exact_match(answer, query("something else", reference)) is same


def test_any_reference_will_do_and_none_matches_nothing():
    assert exact_match("NYC", query("New York", "nyc"))
    assert not exact_match("NYC", query())


@given(st.text())
def test_normalising_twice_changes_nothing_that_matters(text):
    once = normalize_answer(text)
    assert once == " ".join(once.split())
    assert exact_match(text, query(text))


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1,234.5", "1234.5", True),
        ("$1,234", "1234", True),
        ("-3", "3", False),
        ("\u22123", "-3", True),  # a typographic minus
        ("1e3", "1000", True),
        ("2 million", "2,000,000", True),
        ("12%", "0.12", True),
        ("12", "12%", False),
        ("100 km", "100", True),
        ("100 km", "100 km", True),
        ("100 miles", "100 km", False),
        ("1.0000005", "1", True),  # 5e-7 <= 1e-6 * max(1, 1)
        ("1.000002", "1", False),
        ("1,23", "1.23", False),  # no thousands separator, and no guess that it is a decimal comma
        ("about 5", "5", False),
        ("5 or 6", "5", False),
        ("", "0", False),
        (".5", "0.5", True),
        ("5.", "5", True),
        ("1e999", "5", False),
        ("Lima", "Lima", False),
    ],
)
def test_numbers_are_compared_as_quantities(answer, reference, same):
    assert numeric(answer, query("no number", reference)) is same


@pytest.mark.parametrize(
    ("answer", "same"),
    [("B", True), ("b", True), ("(B)", True), ("B.", True), ("B: Lima", True), ("[b] Lima", True), ("A", False),
     ("Because", False), ("B cat", False), ("", False), ("42", False)],
)  # fmt: skip
def test_a_choice_is_a_letter_alone_or_marked(answer, same):
    assert choice(answer, query("B")) is same


def test_no_answer_is_a_wrong_answer():
    assert correctness(exact_match, None, query("x")) == scored(0)
    assert correctness(exact_match, "X", query("x")) == scored(1)


def test_a_verifier_that_raises_has_failed():
    def broken(answer, query):
        raise TimeoutError("service")

    component = correctness(broken, "x", query("x"), name="my:verifier")
    assert component.status is ScoreStatus.FAILED
    assert component.reason == "my:verifier: TimeoutError('service')"


def test_a_users_own_function_is_found_by_its_import_path(monkeypatch):
    module = types.ModuleType("acme_rewards")
    module.half = lambda answer, query: 0.5
    module.PI = 3
    monkeypatch.setitem(sys.modules, "acme_rewards", module)
    assert correctness(verifier_of("acme_rewards:half"), "x", query()) == scored(0.5)
    with pytest.raises(ConfigError, match=r"'acme_rewards:halve'.*no callable 'halve'. It has: half"):
        verifier_of("acme_rewards:halve")
    with pytest.raises(ConfigError, match="no callable 'PI'"):
        verifier_of("acme_rewards:PI")


def test_built_in_verifiers_have_names():
    assert verifier_of("numeric") is numeric
    with pytest.raises(ConfigError, match=r"'exact'.*exact_match, numeric, choice"):
        verifier_of("exact")


def test_a_module_that_is_not_there_is_named_with_the_fix():
    with pytest.raises(ConfigError, match=r"'no_such_module_x:f'.*cannot be imported.*PYTHONPATH"):
        verifier_of("no_such_module_x:f")
    with pytest.raises(ConfigError, match="before the colon"):
        verifier_of(":f")
