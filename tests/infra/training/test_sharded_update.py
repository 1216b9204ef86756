"""An update on two processes: torchrun, FSDP2 and gloo, as on several GPUs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.policies import require_version, version_faults
from infra.training.policy_update import carry_out, find_update
from infra.training.sharded_job import ShardedJob, write_job
from infra.training.trajectory_share import training_trajectories
from mgrpo_core.errors import InfrastructureError, NonFiniteError
from tests.infra.training.stored_update import (
    POLICY,
    RUN,
    StoredUpdate,
    config_of,
    store_run,
    store_update,
)

ROOT = Path(__file__).parents[3]
FIRST = ((8, 20, 9, 30, 11, 14), (1.0, -1.0, 0.5, -0.25, 0.75, -0.5))
SECOND = ((12,), (-1.0,))  # of two ranks one goes without
LONG = 2000  # epochs: a minute and more


def new_update(folder: Path, processes: int, **settings: object) -> StoredUpdate:
    files, run_config = StoreFiles(str(folder / "store")), config_of(processes, **settings)
    store_run(files, run_config, folder)
    return store_update(files, run_config, *FIRST)


def next_update(before: StoredUpdate, processes: int) -> StoredUpdate:
    return store_update(before.files, config_of(processes, steps=1, kl=0.1), *SECOND, iteration=1)


def carried_out(update: StoredUpdate, folder: Path) -> tuple[Path, dict]:
    """Folder of the new version, and the figures, with the last progress that was told beside them."""
    told = [(0, 0)]
    done = carry_out(update.files, update.config, update.order, folder / "cache", lambda *news: told.append(news))
    assert find_update(update.files, update.config, update.order) == done
    version = require_version(update.files, RUN, POLICY, POLICY, done.step.to_version)
    assert not version_faults(update.files, version)
    place = update.files.full(layout.policy_folder(RUN, POLICY, version.version))
    return Path(place), json.loads(update.files.read(done.figures.path))["figures"] | {"told": told[-1]}


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> dict[int, list[tuple[Path, dict]]]:
    """Two updates after each other: 1 then 2 processes, 2 then 1, and 1 both times under 0."""
    found = {}
    for name, counts in ((0, (1, 1)), (1, (1, 2)), (2, (2, 1))):
        folder = tmp_path_factory.mktemp(f"chain-{name}")
        update = new_update(folder, counts[0], kl=0.1)
        first = carried_out(update, folder)
        found[name] = [first, carried_out(next_update(update, counts[1]), folder)]
    return found


def require_close(found: Path, wanted: Path) -> None:
    """Weights within 1e-6, moments within 1e-9 (1e-7 and 5e-10 were measured): float32 sums in another order.

    Gradients are clipped to a norm of 0.05 over 55 thousand numbers, 2e-4 each, so rounding is about 1e-11. A step is
    lr g / (|g| + eps) with lr 1e-3 and eps 1e-8: at worst 1e-3 x 1e-11 / 1e-8 = 1e-6 apart.
    """
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in wanted.iterdir())
    for file, tolerance in (("model.safetensors", 1e-6), ("optimizer.safetensors", 1e-9)):
        mine, theirs = load_file(found / file), load_file(wanted / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for file in ("config.json", "generation_config.json", "tokenizer.json", "trainer_state.json"):
        assert (found / file).read_bytes() == (wanted / file).read_bytes(), file


def require_same_figures(found: dict, wanted: dict) -> None:
    packing = ("tokens_computed", "padding_share")  # each rank pads on its own
    assert found["told"] == wanted["told"]
    for name in wanted.keys() - {"told", *packing}:
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert found.keys() == wanted.keys()


def test_two_processes_make_the_version_of_one(both):
    found, figures = both[2][0]
    wanted, wanted_figures = both[0][0]
    require_close(found, wanted)
    require_same_figures(figures, wanted_figures)
    assert figures["optimizer_steps"] == 2
    assert figures["trajectories"] == 6
    assert figures["told"][0] == figures["told"][1] == sum(FIRST[0])
    assert figures["ref_kl"] > 0, "the second step is away from the reference"
    assert "lm_head.weight" not in load_file(found / "model.safetensors"), "tied"


@pytest.mark.parametrize("name", [1, 2], ids=["one process, then two", "two processes, then one"])
def test_an_update_goes_on_where_another_number_of_processes_left_it(both, name):
    found, figures = both[name][1]
    wanted, wanted_figures = both[0][1]
    require_close(found, wanted)
    require_same_figures(figures, wanted_figures)
    assert json.loads((found / "trainer_state.json").read_text())["optimizer_steps"] == 3


def test_a_loss_that_is_not_finite_names_its_trajectory_and_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra/__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # where somebody works on an `infra` of theirs: the ranks find ours
    files, settings = StoreFiles(str(tmp_path / "store")), config_of(2, steps=1)
    store_run(files, settings, tmp_path)
    lengths, advantages = FIRST
    # of the second rank; 1e39 overflows float32
    update = store_update(files, settings, lengths, [*advantages[:-1], 1e39])
    before = files.files_below(RUN)
    broken = training_trajectories(files, settings, update.order)[-1].trajectory_id
    with pytest.raises(NonFiniteError, match=f"^trajectory {broken}: its share of the loss is not finite"):
        carry_out(files, settings, update.order, tmp_path / "cache")
    assert files.files_below(RUN) == before


def started(update: StoredUpdate, folder: Path) -> subprocess.Popen:
    """A process that carries out the update, once its ranks have done a first micro-batch."""
    (folder / "order").mkdir()
    write_job(folder / "order", ShardedJob(update.files.root, update.config, update.order, folder, folder, None))
    command = [sys.executable, "-m", "tests.infra.training.update_program"]
    process = subprocess.Popen(
        [*command, str(folder / "order"), str(folder / "cache"), str(folder / "begun")],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    until(lambda: (folder / "begun").exists() or process.poll() is not None, 60)
    assert process.poll() is None
    return process


def until(true, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert true()


def processes_with(text: str) -> list[int]:
    """Processes that live and have this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_no_process_outlives_the_one_that_started_it(tmp_path, number, code):
    update = new_update(tmp_path, 2, epochs=LONG)
    process = started(update, tmp_path)
    try:
        assert len(processes_with(str(tmp_path))) == 4, "the starter, torchrun and two ranks"
        process.send_signal(number)
        assert process.wait(15) == code
        until(lambda: not processes_with(str(tmp_path)), 5)
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_killed_is_an_error_in_words(tmp_path):
    update = new_update(tmp_path, 2, epochs=LONG)

    killed = []

    def kill_a_rank(done: int, total: int) -> None:
        if done and not killed:
            torchrun = processes_with("torch.distributed.run")
            killed.append(max(set(processes_with("infra.training.sharded_update")) - set(torchrun)))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(InfrastructureError, match=r"'main': a rank ended without a word \(Signal 9 \(SIGKILL\)"):
        carry_out(update.files, update.config, update.order, tmp_path / "cache", kill_a_rank)
