"""Damage that readers meet without looking at hashes: told as damage, and not as a fault of the reader."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.store.runs import StoredRun
from mgrpo_core.errors import MGRPOError, TableIntegrityError


@contextmanager
def making_sense_of(run: StoredRun) -> Iterator[None]:
    """Read a run's tables, each of which may be whole and say what cannot be: a row of no query, a negative weight.

    Raises: TableIntegrityError in place of a KeyError, IndexError, ValueError or ArithmeticError; our own errors pass.
    """
    try:
        yield
    except MGRPOError:
        raise
    except (KeyError, IndexError, ValueError, ArithmeticError) as error:
        raise TableIntegrityError(
            f"{run.uri}: what is stored makes no sense ({type(error).__name__}: {error}). "
            f"Run `mgrpo verify {run.name}`."
        ) from error
