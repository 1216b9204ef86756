import math

import pytest
import torch
from safetensors.torch import load_file

from infra.store.files import StoreFiles
from infra.training.device import require_devices, training_device
from infra.training.policy_update import carry_out
from tests.infra.training.stored_update import config_of, store_run, store_update

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_without_a_gpu_policies_are_trained_on_the_cpu():
    assert training_device() == torch.device("cpu")
    require_devices("main", 8)  # as many processes as one likes


@pytest.mark.gpu
@on_gpu
def test_an_update_on_the_gpu_is_that_on_the_cpu_up_to_rounding(tmp_path, monkeypatch):
    made = []
    for name in ("gpu", "cpu"):
        folder = tmp_path / name
        files, settings = StoreFiles(str(folder / "store")), config_of(1, kl=0.1)
        store_run(files, settings, folder)
        update = store_update(files, settings, [8, 20, 9, 30], [1.0, -1.0, 0.5, -0.25])
        if name == "cpu":
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        carry_out(files, settings, update.order, folder / "cache")
        made.append(load_file(files.full("r/policies/main/00000001/model.safetensors")))
    first, second = (torch.cat([tensors[name].flatten() for name in sorted(tensors)]) for tensors in made)
    assert math.isfinite(first.sum())
    # Adam's first steps are the sign of a gradient: where that is rounding, they differ by up to 2 lr
    assert torch.isclose(first, second, rtol=1e-4, atol=1e-5).float().mean() > 0.99
