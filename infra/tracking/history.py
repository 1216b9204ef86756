"""The metrics of a run's iterations, read from the store once and kept; what the curves are drawn from."""

import json
from concurrent.futures import ThreadPoolExecutor

from infra.store import layout
from infra.store.files import StoreFiles
from infra.tracking.charts import HELD_OUT, ITERATION
from mgrpo_core.errors import MGRPOError

_READERS = 16  # requests in flight: an object store answers each in tens of milliseconds


class RunHistory:
    """One row of numbers an iteration, with the held-out success measured before it where there is one."""

    def __init__(self, files: StoreFiles, run: str) -> None:
        self._files = files
        self._run = run
        self._metrics: dict[int, dict[str, float]] = {}

    def rows(self, iterations: int) -> list[dict[str, float]]:
        """Rows of the first `iterations` iterations; only those not seen yet are read."""
        rows = {number: {ITERATION: float(number), **self.metrics(number)} for number in range(iterations)}
        return self._with_evaluations(rows, iterations)

    def sound_rows(self, iterations: int) -> tuple[list[dict[str, float]], list[str]]:
        """The same of what can be read, and what is wrong with the rest; many are read at once."""
        faults: list[str] = []

        def read(number: int) -> None:
            try:
                self.metrics(number)
            except (MGRPOError, ValueError) as error:
                faults.append(f"iteration {number}: {error}")

        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(read, (number for number in range(iterations) if number not in self._metrics)))
        rows = {
            number: {ITERATION: float(number), **self._metrics[number]}
            for number in range(iterations)
            if number in self._metrics
        }
        return self._with_evaluations(rows, iterations), sorted(faults)

    def _with_evaluations(self, rows: dict[int, dict[str, float]], iterations: int) -> list[dict[str, float]]:
        for name in self._files.names(layout.evaluations_folder(self._run)):
            after, values = self._evaluation(name)
            if after <= iterations:
                rows.setdefault(after, {ITERATION: float(after)}).update(values)
        return [rows[number] for number in sorted(rows)]

    def metrics(self, iteration: int) -> dict[str, float]:
        """The metrics of one committed iteration."""
        if iteration not in self._metrics:
            self._metrics[iteration] = json.loads(self._files.read(layout.metrics_file(self._run, iteration)))
        return self._metrics[iteration]

    def _evaluation(self, name: str) -> tuple[int, dict[str, float]]:
        raw = json.loads(self._files.read(f"{layout.evaluations_folder(self._run)}/{name}"))
        rate = raw["rate"]
        if raw["decoding"]["temperature"] == 0:
            return raw["after"], {"held_out/greedy": rate["rate"]}
        return raw["after"], {HELD_OUT: rate["rate"], f"{HELD_OUT}_low": rate["low"], f"{HELD_OUT}_high": rate["high"]}
