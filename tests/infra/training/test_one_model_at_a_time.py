"""Policies are loaded, laid out for servers and given adapters in threads: each must come out as if it were alone."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.quickstart.tokenizers import build_tokenizer
from infra.serving.vllm.probe import probe_of
from infra.serving.vllm.served_folder import served_folder
from infra.training.adapters import trained_parameters
from infra.training.load_policy import load_model, load_trained
from mgrpo_core.config import LoraConfig

ROUNDS = 25


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is stored in half precision, with a tied head, as builtin ones are."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer(["red blue which colour is it"], ["<answer>red</answer>"], 300)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def beside(other: Callable[[int], object], work: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What the work gives, again and again, while another thread does something else."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for number in itertools.count():
                if ended.is_set():
                    return
                other(number)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found = [work() for _ in range(ROUNDS)]
    finally:
        ended.set()
        thread.join()
    assert not failed, failed
    return found


def test_a_probe_is_the_same_while_another_policy_is_laid_out_for_its_server(halved, tmp_path):
    ids = list(range(5, 45))
    alone = probe_of(halved, ids, 512).logits_NV
    found = beside(
        lambda number: served_folder(halved, tmp_path / f"{number}", moved=False),
        lambda: probe_of(halved, ids, 512).logits_NV,
    )
    assert alone.dtype == torch.float32
    assert all(torch.equal(one, alone) for one in found)


def test_a_model_is_the_same_while_another_is_read_in_another_precision(halved):
    def position_tables() -> torch.Tensor:
        return dict(load_model(halved, torch.float32).named_buffers())["model.rotary_emb.inv_freq"]

    alone = position_tables()
    found = beside(lambda _: load_model(halved, torch.bfloat16), position_tables)
    assert all(one.dtype == torch.float32 and torch.equal(one, alone) for one in found)


def test_an_adapter_is_drawn_from_its_own_seed_while_another_is_drawn(halved):
    lora = LoraConfig(rank=4, alpha=8.0)

    def adapter(seed: int) -> torch.Tensor:
        model = load_trained(halved, lora, torch.float32, seed)
        return torch.cat([one.flatten() for one in trained_parameters(model).values()])

    alone = adapter(1)
    assert not torch.equal(alone, adapter(2))
    found = beside(lambda _: adapter(2), lambda: adapter(1))
    assert all(torch.equal(one, alone) for one in found)
