"""A policy sharded over two processes (FSDP2 on gloo) is updated as one in a single process is."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo_core.errors import ConfigError, ShapeError
from mgrpo_core.update.policy_gradient import OneRank, UpdateSettings, policy_gradient
from tests.mgrpo_core.update.sharded_update import settings_of, shares
from tests.mgrpo_core.update.small_policies import small_policy

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two ranks found, by case. One launch: starting the processes is what takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.mgrpo_core.update.sharded_update"]
    files = [str(folder / "rendezvous"), str(folder / "out")]
    with ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen([*command, str(rank), "2", *files], cwd=ROOT, stderr=subprocess.PIPE, text=True)
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                _, messages = process.communicate(timeout=240)
                assert process.returncode == 0, messages
        finally:
            for process in processes:
                process.kill()
    return [torch.load(folder / f"out.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", ["uneven", "minibatches"])
def test_two_ranks_update_as_one_process_does(ranks, case):
    first, second = (rank[case] for rank in ranks)
    model = small_policy()
    trajectories = [one for share in shares(case) for one in share]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    metrics = asdict(
        policy_gradient(
            model, trajectories, optimizer, settings_of(case), rng=np.random.default_rng(7), reference=small_policy(5)
        )
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    # Adam divides by the root of the squared gradient: where that is rounding only, steps of up to lr differ.
    close = torch.isclose(first["weights"], weights, rtol=0, atol=1e-6)
    assert close.float().mean() > 0.995
    assert (first["weights"] - weights).abs().max() <= 2.1 * metrics["optimizer_steps"] * 1e-3
    assert torch.equal(first["weights"], second["weights"])
    assert first["metrics"] == second["metrics"]
    packing = ("tokens_computed", "padding_share")  # each rank pads on its own
    for name, value in metrics.items():
        if name not in packing:
            assert first["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_rank_that_fails_stops_all_and_names_its_trajectory(ranks):
    found = [rank["broken"] for rank in ranks]
    assert "OtherRankError: the loss of another rank is not finite" in found[0]["error"]
    assert "trajectory trajectory-00" in found[1]["error"]
    before = torch.cat([parameter.detach().flatten() for parameter in small_policy().parameters()])
    assert all(torch.equal(rank["weights"], before) for rank in found)


class TwoAlike(OneRank):
    """Two ranks of which the other holds what this one does."""

    count = 2

    def sum(self, values):
        return 2 * values


def refused(**kwargs) -> None:
    trajectories = [one for share in shares("uneven") for one in share]
    model = small_policy()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = UpdateSettings(optimizer_steps=2)
    policy_gradient(model, trajectories, optimizer, settings, rng=np.random.default_rng(0), ranks=TwoAlike(), **kwargs)


def test_minibatches_of_several_ranks_need_the_ids_of_all():
    with pytest.raises(ConfigError, match="2 ranks and 2 minibatches, but not the ids"):
        refused()


def test_a_trajectory_on_two_ranks_is_refused():
    with pytest.raises(ShapeError, match="18 trajectories take part over 2 ranks, 18 of them among the 9"):
        refused(all_ids=[f"trajectory-{index:03d}" for index in range(9)])
