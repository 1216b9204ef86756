"""LoRA adapters on a real vLLM server: a new name for every version, the old one gone, and the probe as judge."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.local_servers import _free_ports
from infra.serving.vllm.server_api import ServerApi
from infra.serving.vllm.server_process import ServerProcess
from infra.store.adapter_folder import ADAPTER_WEIGHTS, link_base
from infra.training.adapters import put_adapter, save_adapter, trained_parameters
from infra.training.load_policy import load_model
from mgrpo_core.config import LoraConfig, ServingConfig
from mgrpo_core.errors import PolicyServerError
from tests.infra.serving.vllm.played_server import CONTEXT
from tests.infra.serving.vllm.test_real_server import ask, prompt_of, trainer_logprobs

pytestmark = pytest.mark.timeout(600)
LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def adapters(versions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Versions 0, whole, and 1 and 2, two adapters on it, each with an effect."""
    folders = [versions[0]]
    for number in (1, 2):
        model = load_model(versions[0], torch.float32)
        put_adapter(model, LORA, seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, weight in trained_parameters(model).items():
                if ".lora_B." in name:
                    weight += 0.05 * torch.randn(weight.shape, generator=generator)
        folders.append(tmp_path_factory.mktemp(f"adapter-{number}"))
        save_adapter(folders[-1], LORA, trained_parameters(model))
        link_base(folders[-1], versions[0])
    return folders[0], folders[1], folders[2]


@pytest.fixture(scope="module")
def server(
    build: VllmBuild, versions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One with room for an adapter; its base has a tied head, as the trainer wrote it."""
    port = _free_ports(1)[0]
    settings = ServerSettings("main", versions[0], "float32", CONTEXT, "127.0.0.1", port, lora_rank=LORA.rank)
    with ServerProcess(build, settings, tmp_path_factory.mktemp("server") / "log") as process:
        process.wait_until_it_answers(500)
        yield process


@pytest.fixture
def client(server: ServerProcess, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Iterator[VllmPolicyClient]:
    with VllmPolicyClient(
        "main",
        CONTEXT,
        [server.url],
        dtype="float32",
        serving=ServingConfig(deadline_s=20.0),
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False),
        label_of=lambda version: "main/0/a" if version == 0 else f"main/0/a+{version}/b",
        scratch=tmp_path / "served",
    ) as made:
        yield made


def names(server: ServerProcess) -> list[str]:
    return sorted(model["id"] for model in httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"])


def told(server: ServerProcess, route: str, body: dict) -> None:
    """By somebody else than the client."""
    assert httpx.post(f"{server.url}{route}", json=body, trust_env=False).status_code == 200


async def test_adapters_come_and_go_and_are_proven(server, client, adapters):
    prompt = prompt_of(adapters[0], "Which is the capital of Peru? " * 20)
    for version in (0, 1, 2, 1, 0, 2):
        client.load(version, adapters[version])
        (published,) = client.publications
        assert published.gap.most < 1e-4
        own = {client._label_of(version)} if version else set()
        assert names(server) == sorted({"main", *own}), "the old one is unloaded"
        made = await ask(client, prompt)
        assert made.policy_version == version
        expected = trainer_logprobs(adapters[version], prompt, made, 1.0)
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4, rtol=0)
    assert published.loaded_bytes == (adapters[2] / ADAPTER_WEIGHTS).stat().st_size, "the base is not moved again"


def test_an_old_adapter_under_a_new_name_stops_the_run_with_both_numbers(client, adapters, monkeypatch):
    client.load(1, adapters[1])
    load = ServerApi.load_adapter

    async def load_the_old_one(self: ServerApi, name: str, folder: Path) -> None:
        await load(self, name, adapters[1])

    with monkeypatch.context() as sabotage:
        sabotage.setattr(ServerApi, "load_adapter", load_the_old_one)
        with pytest.raises(PolicyServerError, match=r"policy 'main' version 2 at http.*server -\d.*trainer -\d"):
            client.load(2, adapters[2])
    client.load(2, adapters[2])  # the label was taken back: base and adapter are loaded anew


def test_a_base_without_its_adapter_stops_the_run(client, adapters, monkeypatch):
    client.load(0, adapters[0])
    generate = ServerApi.generate

    async def without_adapter(self: ServerApi, prompt_ids: np.ndarray, sampling: object, adapter: str | None = None):
        return await generate(self, prompt_ids, sampling)

    with monkeypatch.context() as sabotage:
        sabotage.setattr(ServerApi, "generate", without_adapter)
        with pytest.raises(PolicyServerError, match="differ from the trainer's"):
            client.load(1, adapters[1])


async def test_a_server_that_lost_its_adapter_gets_it_again(server, client, adapters):
    client.load(1, adapters[1])
    told(server, "/v1/unload_lora_adapter", {"lora_name": "main/0/a+1/b"})
    prompt = prompt_of(adapters[0], "Which is the capital of Peru?")
    made = await ask(client, prompt)
    np.testing.assert_allclose(made.logprobs, trainer_logprobs(adapters[1], prompt, made, 1.0), atol=1e-4, rtol=0)


async def test_a_base_that_another_run_replaced_is_loaded_again(server, client, adapters, versions):
    client.load(1, adapters[1])
    told(
        server,
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(versions[1])}},
    )
    told(server, "/update_weight_version", {"new_version": "theirs"})
    prompt = prompt_of(adapters[0], "Which is the capital of Peru?")
    made = await ask(client, prompt)
    np.testing.assert_allclose(made.logprobs, trainer_logprobs(adapters[1], prompt, made, 1.0), atol=1e-4, rtol=0)
