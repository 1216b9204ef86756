"""The logger of a stage: the flow run's where there is one, so that lines reach the Prefect UI."""

import logging
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import MissingContextError


def stage_logger() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """Prefect's run logger inside a run; a plain one in a body called on its own."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("mgrpo")
