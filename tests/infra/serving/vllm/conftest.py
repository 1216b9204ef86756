"""Two versions of a real policy with a tied head, and a vLLM server for them, where vLLM is installed."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from infra.quickstart.builtin import builtin_policy
from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.local_servers import _free_ports
from infra.serving.vllm.server_process import ServerProcess
from infra.training.load_policy import load_model, load_tokenizer
from mgrpo_core.config import ServingConfig
from tests.infra.serving.vllm.played_server import CONTEXT
from tests.servers.vllm_build import vllm_build


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of versions 0 and 1: the quickstart's main policy, and the same with every weight moved."""
    folder = tmp_path_factory.mktemp("versions")
    shutil.copytree(builtin_policy("builtin:quickstart/main"), folder / "0")
    shutil.copytree(folder / "0", folder / "1")
    model = load_model(folder / "0", torch.float32)
    assert model.config.tie_word_embeddings
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder / "1")
    return folder / "0", folder / "1"


@pytest.fixture(scope="session")
def build() -> VllmBuild:
    return vllm_build()


@pytest.fixture(scope="session")
def server(
    build: VllmBuild, versions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of version 0 as the trainer wrote it: its head is tied, the hardest case for new weights."""
    settings = ServerSettings("main", versions[0], "float32", CONTEXT, "127.0.0.1", _free_ports(1)[0])
    with ServerProcess(build, settings, tmp_path_factory.mktemp("server") / "log") as process:
        process.wait_until_it_answers(500)
        yield process


@pytest.fixture(scope="session")
def tokenizer(versions: tuple[Path, Path]) -> PreTrainedTokenizerBase:
    return load_tokenizer(versions[0])


@pytest.fixture
def client_of(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Iterator[Callable[..., VllmPolicyClient]]:
    """Makes clients of policy `main`, closed after the test. What is not named here goes to `serving`."""
    made: list[VllmPolicyClient] = []

    def client(*urls: str, label: str = "a", context: int = CONTEXT, dtype: str = "float32", **serving: object):
        made.append(
            VllmPolicyClient(
                "main",
                context,
                urls,
                dtype=dtype,
                serving=ServingConfig.model_validate({"deadline_s": 5.0, **serving}),
                tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False),
                label_of=lambda version: f"main/{version}/{label}",
                scratch=tmp_path / "served",
            )
        )
        return made[-1]

    yield client
    for one in made:
        one.close()
