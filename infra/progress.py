"""Progress bars of long work on a terminal; silent where nobody watches."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass(slots=True)
class ProgressBoard:
    """Named bars that any stage may open. One board a process: two would overwrite each other's lines."""

    shown: bool
    _progress: Progress | None = field(default=None, init=False)
    _open: int = field(default=0, init=False)

    @property
    def console(self) -> Console:
        """Where lines go that must not tear a bar apart."""
        return self._progress.console if self._progress else Console(stderr=True)

    @contextmanager
    def bar(self, title: str, total: int, unit: str) -> Iterator["Bar"]:
        """A bar from 0 to `total` for as long as the block runs."""
        if not self.shown:
            yield Bar(None, None)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description:<22}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
                transient=True,
            )
        if self._open == 0:
            self._progress.start()
        self._open += 1
        task = self._progress.add_task(title, total=total, unit=unit)
        try:
            yield Bar(self._progress, task)
        finally:
            self._progress.remove_task(task)
            self._open -= 1
            if self._open == 0:
                self._progress.stop()


@dataclass(frozen=True, slots=True)
class Bar:
    """A handle that moves one bar; moving a bar of a silent board does nothing."""

    _progress: Progress | None
    _task: int | None

    def move(self, done: int, total: int | None = None) -> None:
        """Set the bar to `done`, and to another total where it is known only now."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, **({} if total is None else {"total": total}))  # type: ignore[arg-type]


def watched() -> bool:
    """Whether bars make sense: a terminal on standard error."""
    return sys.stderr.isatty()
