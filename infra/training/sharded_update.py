"""One rank of a policy's update: torchrun starts `python -m infra.training.sharded_update FOLDER` once for each."""

import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from infra.store.runs import open_store
from infra.training.process_ranks import process_ranks
from infra.training.rank_reports import RankReports
from infra.training.sharded_job import ShardedJob, read_job
from infra.training.trainer import train_policy, update_settings
from infra.training.trajectory_share import trajectory_share
from mgrpo_core.seeds import rng_of
from mgrpo_core.update.ranks import OtherRankError

_PATIENCE_S = 10.0


def main(folder: Path) -> None:
    """Carry out this rank's part; an error becomes a file that the starter raises again."""
    rank, reports, job = int(os.environ["RANK"]), RankReports(folder), read_job(folder)
    try:
        _update(job, reports)
    except OtherRankError:
        time.sleep(_PATIENCE_S)  # torchrun stops all ranks at the first that ends: let it be the one that knows more
    except Exception as error:
        traceback.print_exc()
        reports.tell_error(rank, job.order.policy, error)
    else:
        return
    sys.stderr.flush()
    os._exit(1)  # not Python's own end, which may wait for ranks that wait for this one


def _update(job: ShardedJob, reports: RankReports) -> None:
    config, order = job.config, job.order
    policy = config.policies[order.policy]
    with process_ranks(config.execution.update_deadline_s) as ranks:
        share = trajectory_share(open_store(job.store), config, order, ranks.index, ranks.count)
        metrics = train_policy(
            job.source,
            job.target,
            share.trajectories,
            policy,
            update_settings(config.loss, config.update, policy),
            rng=rng_of(config.seed, "update", order.iteration, order.policy),
            reference=job.reference,
            on_progress=lambda done, total: reports.tell_progress(ranks.index, done, total),
            ranks=ranks,
            all_ids=share.all_ids,
        )
        if ranks.index == 0:
            reports.tell_figures(asdict(metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
