"""A process that carries out an update as a task does: in a thread, which is told when it is cancelled.

Arguments: folder of the order (a `ShardedJob`), folder for downloads, file that is touched at the first tokens.
"""

import asyncio
import signal
import sys
from pathlib import Path

from infra.store.files import StoreFiles
from infra.training.policy_update import carry_out
from infra.training.sharded_job import read_job
from tasks.stoppable import stoppable


async def main(job_folder: str, cache: str, begun: str) -> None:
    job = read_job(Path(job_folder))

    def note(done: int, total: int) -> None:
        if done:
            Path(begun).touch()

    await stoppable(lambda move: carry_out(StoreFiles(job.store), job.config, job.order, Path(cache), move), note)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    asyncio.run(main(*sys.argv[1:]))
