"""What a sender announces and sends: the checkpoint's names, dtypes and shapes, a tied head among them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infra.serving.vllm.nccl_sender import FolderWeights
from infra.serving.vllm.served_folder import served_folder
from infra.training.load_policy import load_model
from tests.infra.serving.conftest import tiny_qwen3

CPU = torch.device("cpu")


def saved(folder: Path, dtype: torch.dtype = torch.float32, *, tied: bool = True, **how: object) -> Path:
    """A version as the trainer writes it, its optimiser's state beside the weights; laid out for vLLM."""
    tiny_qwen3(1, tie_word_embeddings=tied).to(dtype).save_pretrained(folder / "version", **how)
    (folder / "version" / "optimizer.safetensors").write_bytes(b"moments")
    return served_folder(folder / "version", folder / "served")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}])
def test_every_weight_of_the_version_is_sent_as_it_is_in_its_files(
    tmp_path: Path, tied: bool, dtype: torch.dtype, shards: dict[str, str]
) -> None:
    folder = saved(tmp_path, dtype, tied=tied, **shards)
    weights = FolderWeights(folder, CPU)
    expected = load_model(folder, dtype).state_dict()
    announced = {one.name: (one.dtype, one.shape) for one in weights.metadata()}
    assert announced == {name: (weight.dtype, tuple(weight.shape)) for name, weight in expected.items()}
    assert "lm_head.weight" in announced
    sent = dict(weights)
    assert all(torch.equal(sent[name], weight) for name, weight in expected.items())


def test_a_tied_head_is_the_embedding_once_more(tmp_path: Path) -> None:
    # vLLM's head would stay as it was: it is not among the version's own weights
    sent = dict(FolderWeights(saved(tmp_path), CPU))
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
    assert "lm_head.weight" not in dict(FolderWeights(without_moments(tmp_path / "version"), CPU))


def test_weights_come_in_the_order_in_which_they_were_announced(tmp_path: Path) -> None:
    # vLLM cuts both by it, and a second pass is a fresh one
    weights = FolderWeights(saved(tmp_path, max_shard_size="100KB"), CPU)
    names: Callable[[], list[str]] = lambda: [name for name, _ in weights]  # noqa: E731
    assert [one.name for one in weights.metadata()] == names() == names()
    assert len(names()) == len(set(names()))


def without_moments(folder: Path) -> Path:
    (folder / "optimizer.safetensors").unlink()
    return folder
