"""A run that trains one policy by LoRA: small versions, a resume, and readers that find the same policy in them."""

import shutil
from pathlib import Path

import pytest

from infra.replay.iteration import replay_stored
from infra.replay.verdicts import Outcome
from infra.store.runs import open_store, require_run, resume_point
from infra.store.verify import verify_run
from mgrpo_core.errors import TableIntegrityError
from tests.flows.program import Program
from tests.flows.stored import manifest_of, metrics_of, versions_of


@pytest.fixture(scope="module")
def trained(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of one iteration, resumed by another process to make two more."""
    store = tmp_path_factory.mktemp("adapters")
    for iterations in (1, 3):
        ended = program.run(
            *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", iterations),
            *("--set", "policies.main.lora={rank: 2, alpha: 8}", "--set", "update.optimizer_steps=2"),
        )
        assert ended.code == 0, ended.err
    return store


def test_only_the_adapter_is_stored_and_the_base_stays(trained):
    assert len(versions_of(trained, "main")) > 1
    whole, *adapters = sorted((trained / "r/policies/main").iterdir())
    assert (whole / "model.safetensors").exists()
    for folder in adapters:
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json",
            "update.json", "version.json",
        ]  # fmt: skip
    size = (adapters[0] / "adapter_model.safetensors").stat().st_size
    assert size < (whole / "model.safetensors").stat().st_size / 4
    assert (trained / "r/policies/sub/00000001/model.safetensors").exists(), "the other policy trains all weights"


@pytest.mark.parametrize("iteration", range(3))
def test_every_iteration_replays_to_the_bit_also_the_one_after_the_resume(trained, iteration):
    report = replay_stored(str(trained), "r", iteration, "update")
    assert report.equal, report.conclusion()
    found = {verdict.stage: verdict for verdict in report.verdicts}
    assert found["update main"].outcome is Outcome.EQUAL
    step = manifest_of(trained, iteration)["policies"]["main"]
    if step["to_version"] > step["from_version"]:
        assert found["update main"].compared > 1000, "A, B and their moments"
    # the embedded engine sampled with the adapter merged, the trainer scores with it merged: two programs
    assert found["log-probs main"].outcome in (Outcome.CLOSE, Outcome.EQUAL)


def test_sampler_and_trainer_agree_on_a_policy_with_an_adapter(trained):
    for iteration in range(3):
        assert metrics_of(trained, iteration)["update/main/mismatch_max"] < 1e-4


def test_the_run_verifies_and_a_changed_base_does_not(trained, tmp_path):
    run = require_run(open_store(str(trained)), "r")
    assert verify_run(run).sound
    assert resume_point(run).iteration == 3
    copy = Path(shutil.copytree(trained, tmp_path / "store"))
    file = copy / "r/policies/main/00000000/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = require_run(open_store(str(copy)), "r")
    assert verify_run(damaged).usable_through == -1
    with pytest.raises(TableIntegrityError, match=r"version 0 of policy 'main' is damaged.*Nothing was changed"):
        resume_point(damaged)
