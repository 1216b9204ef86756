"""1,000,000 sub-trajectories of 125,000 rollouts: alignment and advantages. Run with `pytest --benchmark-only`."""

import numpy as np
import pytest

from mgrpo_core.credit.advantages import GroupAdvantages, grouped_advantages
from mgrpo_core.credit.alignment import align, member_weight, rollout_keys

ROLLOUTS, MEMBERS, K, D = 125_000, 1_000_000, 8, 8
LIMIT_S = 3.0


@pytest.mark.parametrize("mode", ["random", "weighted"])
def test_a_million_sub_trajectories_take_three_seconds_or_less(benchmark, mode):
    rng = np.random.default_rng(0)
    rollout_N = np.sort(rng.integers(0, ROLLOUTS, MEMBERS))
    reward_N = rng.integers(0, 11, MEMBERS) / 10
    query_ids = [f"q{rollout // K}" for rollout in range(ROLLOUTS)]
    indices = [rollout % K for rollout in range(ROLLOUTS)]

    def align_and_compare() -> GroupAdvantages:
        key_R = rollout_keys(0, 3, "searcher", query_ids, indices)
        weight_N = member_weight(align(rollout_N, key_R, D, mode), MEMBERS)
        return grouped_advantages(reward_N, rollout_N // K, weight_N)

    found = benchmark.pedantic(align_and_compare, rounds=5, warmup_rounds=1)
    assert found.weight_G.sum() == pytest.approx(D * len(np.unique(rollout_N)))
    assert benchmark.stats.stats.median <= LIMIT_S
