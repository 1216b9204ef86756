"""Addresses lead back to what they were made of, and nonsense in one is no error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ui.addresses import (
    VIEWS,
    ComparePage,
    IterationPage,
    RolloutPage,
    Shown,
    Wanted,
    page_of,
    shown_of,
    wanted_of,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("page", [IterationPage(12), RolloutPage(12, 3, 0), ComparePage(1, 2, 3, 4)])
def test_a_page_is_found_by_its_path(page):
    assert page_of(page.path) == page
    assert page_of(f"{page.path}/") == page


@pytest.mark.parametrize(
    "path", [None, "", "/", "/iteration/-1", "/iteration/x", "/iteration/1/2", "/iteration/१", "//"]
)
def test_what_is_no_page_is_none(path):
    assert page_of(path) is None


@given(
    st.builds(Wanted, **dict.fromkeys(("agent", "status", "sign", "query", "rollout", "low", "high", "text"), _TEXT))
)
def test_a_filter_survives_its_address(wanted):
    assert wanted_of(wanted.search) == wanted


@given(st.builds(Shown, st.none() | _TEXT.filter(bool), st.sampled_from(VIEWS), st.integers(0, 10**8)))
def test_a_view_survives_its_address(shown):
    assert shown_of(shown.search) == shown


@given(st.text(max_size=60))
def test_no_address_is_an_error(search):
    wanted_of(search)
    shown_of(f"?{search}")


def test_half_a_character_is_no_error():
    assert wanted_of(Wanted(text="\ud800").search).text == "?"
