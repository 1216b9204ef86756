"""The quickstart learns: from its shipped start, on a CPU, in under a minute, and past a resume."""

from pathlib import Path

import pytest

from flows.load_config import load_config
from flows.train_run import train_run
from infra.quickstart.builtin import POLICIES
from tests.flows.stored import metrics_of

pytestmark = [
    pytest.mark.learning,
    pytest.mark.skipif(not POLICIES.is_dir(), reason="the quickstart's policies are not in this checkout"),
]

FIRST, ALL = 4, 7


async def _train(store: Path, iterations: int) -> None:
    settings = ["seed=1", "evaluation.every=0", "tracking.mlflow=false", "execution.threads=1"]
    config = load_config("quickstart", [*settings, f"iterations={iterations}"])
    await train_run(config, run="r", store=str(store), quiet=True)


async def test_success_and_the_searcher_s_reward_rise_and_go_on_rising_after_a_resume(prefect_server, tmp_path):
    await _train(tmp_path, FIRST)
    await _train(tmp_path, ALL)

    # Measured, seeds 0 and 1, iterations 0 to 6: success 0.02 to 0.49 and 0.03 to 0.69, searcher 0.25 to 0.80 and 0.20
    # to 0.89. 128 rollouts at a success of 0.5 have a standard error of 0.04.
    success = [metrics_of(tmp_path, iteration)["success"] for iteration in range(ALL)]
    searcher = [metrics_of(tmp_path, iteration)["searcher/reward"] for iteration in range(ALL)]
    assert success[0] < 0.15
    assert _last_two(success) > success[0] + 0.2
    assert _last_two(searcher) > searcher[0] + 0.3
    assert _last_two(success) > success[FIRST - 1] + 0.1, "no progress since the resume"


def _last_two(values: list[float]) -> float:
    return (values[-1] + values[-2]) / 2
