"""A LoRA update on two processes: only the adapter is gathered, and it is that of one process."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.policies import require_version, version_faults
from infra.training.policy_update import carry_out
from mgrpo_core.config import LoraConfig
from tests.infra.training.stored_update import POLICY, RUN, config_of, store_run, store_update


def version_made_by(processes: int, folder: Path) -> Path:
    config = config_of(processes)
    policy = config.policies[POLICY].model_copy(update={"lora": LoraConfig(rank=3, alpha=6.0)})
    config = config.model_copy(update={"policies": {**config.policies, POLICY: policy}})
    files = StoreFiles(str(folder / "store"))
    store_run(files, config, folder)
    update = store_update(files, config, (8, 20, 9, 30), (1.0, -1.0, 0.5, -0.25))
    done = carry_out(files, config, update.order, folder / "cache")
    made = require_version(files, RUN, POLICY, POLICY, done.step.to_version)
    assert made.base is not None
    assert made.base.version == 0
    assert not version_faults(files, made)
    return Path(files.full(layout.policy_folder(RUN, POLICY, made.version)))


def test_two_processes_make_the_adapter_of_one(tmp_path):
    one, two = (version_made_by(count, tmp_path / str(count)) for count in (1, 2))
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
    assert "model.safetensors" not in {path.name for path in two.iterdir()}
    for file, tolerance in (("adapter_model.safetensors", 1e-6), ("optimizer.safetensors", 1e-8)):
        theirs, ours = load_file(one / file), load_file(two / file)
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():  # sums in another order
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    moved = load_file(one / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-4 for name, tensor in moved.items() if ".lora_B." in name)
