"""How far long work is, as a progress artifact of its flow run: a look at the UI tells."""

import asyncio
import logging
from types import TracebackType
from typing import Self

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext

EVERY_S = 5.0
"""Between two updates of the artifact: each is a request and a row."""


class WorkProgress:
    """A progress artifact for as long as the block runs; none where no server would show it.

    `move` may be called from any thread, as often as the work likes.
    """

    def __init__(self, title: str, unit: str) -> None:
        self._title = title
        self._unit = unit
        self._shown = (TaskRunContext.get() or FlowRunContext.get()) is not None
        self._done, self._total = 0, 0
        self._pump: asyncio.Task[None] | None = None

    def move(self, done: int, total: int) -> None:
        """Note that `done` of `total` are done."""
        self._done, self._total = done, total

    @property
    def percent(self) -> float:
        return 100 * self._done / self._total if self._total else 0.0

    async def __aenter__(self) -> Self:
        if self._shown:
            self._pump = asyncio.create_task(self._show())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pump is None:
            return
        self._pump.cancel()
        await asyncio.wait([self._pump])

    async def _show(self) -> None:
        """The first artifact comes after a while: short work needs none."""
        artifact = None
        shown = -1.0
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                if self.percent == shown:
                    continue
                shown = self.percent
                words = f"{self._title}: {self._done} of {self._total} {self._unit}"
                if artifact is None:
                    artifact = await acreate_progress_artifact(shown, description=words)
                else:
                    await aupdate_progress_artifact(artifact, shown, description=words)
        except asyncio.CancelledError:
            if artifact is not None and self._done >= self._total:
                await aupdate_progress_artifact(artifact, 100.0, description=f"{self._title}: done")
            raise
        except Exception as error:  # whatever keeps the artifact away must not end the work
            logging.getLogger("mgrpo").warning("No progress is shown for %s: %s", self._title, error)
