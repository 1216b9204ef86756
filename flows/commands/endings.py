"""How a command ends: what it prints for programs, and its exit code."""

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from infra.traces.visible import visible
from mgrpo_core.errors import (
    ConfigError,
    DatasetError,
    MGRPOError,
    ShapeError,
    StoreError,
    TableIntegrityError,
    TemplateError,
)

T = TypeVar("T")

_INTERRUPTED = "Interrupted. What is staged or committed is kept; the same command continues."

# Wrong input is refused with 2 before work starts; work that fails ends with 1.
_BAD_INPUT = (ConfigError, DatasetError, TemplateError, StoreError, ShapeError)


@contextmanager
def errors_to_exit_codes(interrupted: str = _INTERRUPTED, *, damaged: int = 2) -> Iterator[None]:
    """End with 2 for what was asked wrongly, 1 for what failed.

    Args:
        interrupted: what to say after Ctrl-C.
        damaged: exit code where a file of the store is not what it should be. Commands that only read say 1.
    """
    try:
        yield
    except TableIntegrityError as error:
        typer.secho(visible(str(error)), fg="red", err=True)
        raise typer.Exit(damaged) from None
    except _BAD_INPUT as error:
        typer.secho(visible(str(error)), fg="red", err=True)
        raise typer.Exit(2) from None
    except MGRPOError as error:
        typer.secho(visible(f"{type(error).__name__}: {error}"), fg="red", err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.secho(interrupted, err=True)
        raise typer.Exit(130) from None
    except SystemExit as stopped:
        if int(stopped.code or 0) > 128:  # SIGTERM; else whoever read our output has gone, `| head` for one
            typer.secho(interrupted, err=True)
        raise typer.Exit(int(stopped.code or 0)) from None


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end. During a flow run Prefect turns SIGTERM into an exception of its own; it is SystemExit again."""
    from prefect.exceptions import TerminationSignal

    try:
        return asyncio.run(work)
    except TerminationSignal as stopped:
        raise SystemExit(128 + stopped.signal) from None


def print_json(value: Any) -> None:
    """On standard output, for programs. What would steer a terminal is escaped: only strings have it."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))
    sys.stdout.write("\n")
