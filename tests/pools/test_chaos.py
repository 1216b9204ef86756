"""The short form of `python -m tests.pools.chaos`: each kind of kill once, at a random moment of an iteration."""

import random

import pytest

from infra.store.manifests import newest_committed
from tests.pools.chaos import Chaos, faults
from tests.pools.cluster import Cluster


@pytest.mark.timeout(1500)
def test_after_kills_of_everything_nothing_is_lost_doubled_or_left_running(cluster: Cluster) -> None:
    # An update of this team takes seconds; one whose worker, process and last events are all gone is given up soon.
    soon = ("--set", "execution.update_deadline_s=60", "--set", "execution.update_attempts=4")
    assert cluster.mgrpo("deploy", "team.yaml", "--run", cluster.run, *soon).returncode == 0
    chaos = Chaos(cluster, random.Random(0))
    chaos.run(len(chaos.victims), print)
    chaos.calm()
    print(chaos.tally.table())
    assert chaos.left_running() == []
    assert newest_committed(cluster.files(), cluster.run) >= 0
    assert faults(cluster) == []
