"""What a page says where it has nothing to show: what is wrong, and what to do."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from dash import dcc, html

from infra.traces.visible import visible
from infra.ui.addresses import OVERVIEW
from mgrpo_core.errors import MGRPOError

# What content that no writer of ours wrote may raise on its way through a page.
_NO_SENSE = (ValueError, KeyError, IndexError, TypeError, ArithmeticError, OSError, pa.ArrowException)


def notice(title: str, text: str, *, wrong: bool = False) -> html.Div:
    """A box with a title and a text."""
    look = "notice wrong" if wrong else "notice"
    return html.Div([html.Strong(title), html.P(visible(text))], className=look, role="alert" if wrong else "status")


def not_found(path: str) -> html.Main:
    """There is no such page."""
    text = f"There is no page {path}. Pages are iterations, their rollouts, and two rollouts side by side."
    return as_page(notice("No such page", text, wrong=True))


def as_page(only: html.Div) -> html.Main:
    """A page that has nothing but a notice."""
    return html.Main([only, dcc.Link("To the overview", href=OVERVIEW)])


def or_notice(build: Callable[[], Any]) -> Any:
    """What is built, or a notice of why it cannot be."""
    try:
        return build()
    except MGRPOError as error:
        return notice("This cannot be shown", str(error), wrong=True)
    except _NO_SENSE as error:
        text = (
            f"What is stored makes no sense ({type(error).__name__}: {error}). Run `mgrpo verify`, which names faults."
        )
        return notice("This cannot be shown", text, wrong=True)
