"""A process that carries out an update as a task does: in a thread, told to stop when it is cancelled or ends.

Arguments: folder of the order (a `ShardedJob`), folder for downloads, file that is touched at the first progress.
"""

import asyncio
import signal
import sys
import threading
from pathlib import Path

from infra.store.files import StoreFiles
from infra.training.policy_update import carry_out
from infra.training.sharded_job import read_job


async def main(job_folder: str, cache: str, begun: str) -> None:
    job = read_job(Path(job_folder))
    stop = threading.Event()

    def on_progress(done: int, total: int) -> None:
        Path(begun).touch()

    try:
        await asyncio.to_thread(
            carry_out, StoreFiles(job.store), job.config, job.order, Path(cache), on_progress, stop=stop
        )
    finally:
        stop.set()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    asyncio.run(main(*sys.argv[1:]))
