import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.datasets.geo_facts import facts
from infra.tools.registry import build_tool
from infra.tools.search import SearchTool
from mgrpo_core.dialogue.actions import Menu
from mgrpo_core.dialogue.template import ToolSignature
from mgrpo_core.errors import ToolError

_CORPUS = (
    "currency of Guinea: Franc",
    "currency of Equatorial Guinea: CFA Franc",
    "capital of Guinea: Conakry",
    "currency of Peru: Sol",
    "capital of Peru: Lima",
    "country with city São Paulo: Brazil",
)


def _search(query: str, *, results: int = 3) -> str:
    return asyncio.run(SearchTool(_CORPUS, results=results).call({"query": query}))


def test_the_document_of_the_phrase_comes_before_one_that_only_has_its_words() -> None:
    assert _search("currency of Guinea", results=1) == "- currency of Guinea: Franc"


def test_what_is_shown_is_in_the_order_of_the_corpus_not_of_the_rank() -> None:
    assert _search("capital of Peru", results=1) == "- capital of Peru: Lima"
    assert _search("capital of Peru", results=2) == "- capital of Guinea: Conakry\n- capital of Peru: Lima"


def test_accents_and_case_do_not_matter() -> None:
    assert _search("SAO") == "- country with city São Paulo: Brazil"


def test_nothing_found_says_so() -> None:
    assert _search("Atlantis") == "Nothing found."


@pytest.mark.parametrize("query", ["", "?!", '"'])
def test_a_query_without_a_word_is_the_policys_fault(query: str) -> None:
    with pytest.raises(ToolError, match="no word"):
        _search(query)


def test_the_schema_refuses_a_query_without_a_word_before_the_tool_is_called() -> None:
    tool = SearchTool(_CORPUS)
    menu = Menu([ToolSignature(tool.name, tool.description, tool.parameters)])
    assert menu.check("search", {"query": "Peru"}) is None
    assert menu.check("search", {"query": "?!"}) is not None
    assert menu.check("search", {}) is not None


@pytest.mark.parametrize(
    "query", ["Peru OR", "NOT Peru", "NEAR(Peru, 2)", "text: Peru", "Peru*", 'Peru" AND "Sol', "^Peru"]
)
def test_words_of_the_query_language_are_words(query: str) -> None:
    assert "currency of Peru: Sol" in _search(query)


@given(st.text(max_size=40))
def test_any_text_is_answered_or_refused_as_the_policys_fault(query: str) -> None:
    try:
        found = _search(query)
    except ToolError:
        assert not re.search(r"\w", query)
    else:
        assert found == "Nothing found." or set(found.split("\n")) <= {f"- {text}" for text in _CORPUS}


def test_a_query_of_thousands_of_words_is_answered() -> None:
    assert "Lima" in _search(" ".join(f"word{n}" for n in range(5000)) + " Lima")


def test_every_fact_is_found_by_its_key_among_three_short_documents() -> None:
    tool = build_tool("search:geo_facts")

    async def missing() -> list[str]:
        found = {fact.key: await tool.call({"query": fact.key}) for fact in facts()}
        assert all(text.count("\n") <= 2 for text in found.values())
        return [fact.key for fact in facts() if f"- {fact.document}" not in found[fact.key].split("\n")]

    assert asyncio.run(missing()) == []


def test_the_right_document_is_in_every_place_so_that_picking_is_a_skill() -> None:
    tool = build_tool("search:geo_facts")
    some = facts()[::6]  # the index keeps their order: the first would all be shown first

    async def places() -> list[int]:
        return [(await tool.call({"query": fact.key})).split("\n").index(f"- {fact.document}") for fact in some]

    found = asyncio.run(places())
    # Three places; a share of a tenth at least, where an even spread would be a third.
    assert all(found.count(place) >= len(some) / 10 for place in range(3))
