"""A version laid out for vLLM is the same model, with its head written out."""

import json
from pathlib import Path

import pytest
import torch

from infra.serving.vllm.served_folder import served_folder
from infra.training.load_policy import load_model
from tests.infra.serving.conftest import tiny_qwen3


def same_logits(one: Path, other: Path) -> bool:
    ids = torch.arange(40)[None] % 97
    with torch.inference_mode():
        return torch.equal(*[load_model(folder, torch.float32)(input_ids=ids).logits for folder in (one, other)])


def test_a_tied_head_is_written_out_beside_weights_that_are_not_copied(tmp_path: Path) -> None:
    tiny_qwen3(1).save_pretrained(tmp_path / "version")
    target = served_folder(tmp_path / "version", tmp_path / "served")
    assert target == tmp_path / "served"
    assert load_model(target, torch.float32).config.tie_word_embeddings is False
    assert same_logits(tmp_path / "version", target)
    assert (target / "body.safetensors").samefile(tmp_path / "version" / "model.safetensors")
    assert json.loads((tmp_path / "version" / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_sharded_version_keeps_its_shards(tmp_path: Path) -> None:
    tiny_qwen3(1).save_pretrained(tmp_path / "version", max_shard_size="100KB")
    assert len(list((tmp_path / "version").glob("*.safetensors"))) > 1
    assert same_logits(tmp_path / "version", served_folder(tmp_path / "version", tmp_path / "served"))


def test_a_head_of_its_own_needs_nothing(tmp_path: Path) -> None:
    tiny_qwen3(1, tie_word_embeddings=False).save_pretrained(tmp_path / "version")
    assert served_folder(tmp_path / "version", tmp_path / "served") == tmp_path / "version"
    moved = served_folder(tmp_path / "version", tmp_path / "served", moved=True)
    assert moved == tmp_path / "served"
    assert same_logits(tmp_path / "version", moved)


@pytest.mark.parametrize("tied", [True, False])
def test_the_optimisers_state_is_no_weight(tmp_path: Path, tied: bool) -> None:
    # vLLM reads every safetensors file, and refuses `exp_avg`
    tiny_qwen3(1, tie_word_embeddings=tied).save_pretrained(tmp_path / "version")
    (tmp_path / "version" / "optimizer.safetensors").write_bytes(b"moments")
    target = served_folder(tmp_path / "version", tmp_path / "served")
    assert target == tmp_path / "served"
    assert not (target / "optimizer.safetensors").exists()
    assert same_logits(tmp_path / "version", target)


def test_what_is_there_already_is_not_made_again(tmp_path: Path) -> None:
    tiny_qwen3(1).save_pretrained(tmp_path / "version")
    target = served_folder(tmp_path / "version", tmp_path / "served")
    made = (target / "head.safetensors").stat().st_mtime_ns
    assert served_folder(tmp_path / "version", tmp_path / "served") == target
    assert (target / "head.safetensors").stat().st_mtime_ns == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["served", "version"]  # and no half folder
