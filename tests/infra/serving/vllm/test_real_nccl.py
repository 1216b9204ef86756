"""Weight transfer against vLLM's own code: its flag, routes, dataclasses, rendezvous and trainer side, without a GPU.

One test, marked `gpu`, is the whole thing, with a server; it has not been run.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings, server_command, server_environment
from infra.serving.vllm.connections import Connections
from infra.serving.vllm.failures import ServerUnfitError
from infra.serving.vllm.local_servers import _free_ports
from infra.serving.vllm.nccl_transfer import NcclTransfer
from infra.serving.vllm.probe import Probe
from infra.serving.vllm.replica import ServedVersion
from infra.serving.vllm.sender_process import SenderProcess
from infra.serving.vllm.served_folder import served_folder
from infra.serving.vllm.server_api import ServerApi
from infra.serving.vllm.server_process import ServerProcess
from infra.training.load_policy import load_model
from mgrpo_core.config import ServingConfig
from mgrpo_core.errors import ConfigError
from tests.infra.serving.vllm.played_server import CONTEXT

# every process here imports vLLM first: 12 s, or a minute on busy cores
pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Routes:
    """Workers behind vLLM's routes, and where they write what they received."""

    url: str
    record: Path


@pytest.fixture(scope="module")
def routes(build: VllmBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Routes]]:
    """Servers that take weights by NCCL: of 2 workers, of 1, one that fails at the rendezvous; and one without."""
    folder = tmp_path_factory.mktemp("routes")
    settings = ServerSettings("main", folder, "float32", CONTEXT, "127.0.0.1", 8000, nccl=True)
    flags = [word for word in server_command(build, settings) if "transfer" in word]
    assert len(flags) == 1
    servers = [
        {"name": name, "port": port, "workers": 2 if name == "pair" else 1, "flags": [] if name == "without" else flags}
        for name, port in zip(("pair", "single", "broken", "without"), _free_ports(4), strict=True)
    ]
    command = [build.python, "-I", HERE / "vllm_routes.py", folder, *[json.dumps(one) for one in servers]]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=server_environment(build), stdout=output, stderr=subprocess.STDOUT)
    try:
        made = {
            one["name"]: Routes(f"http://127.0.0.1:{one['port']}", folder / f"{one['name']}.json") for one in servers
        }
        for one in made.values():
            while not answers(one):
                assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
                time.sleep(0.2)
        yield made
    finally:
        process.kill()
        process.wait()


def answers(routes: Routes) -> bool:
    try:
        return httpx.get(f"{routes.url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until_free(routes: Routes, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while httpx.get(f"{routes.url}/health", trust_env=False).json()["joining"]:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def on_cpu(build: VllmBuild, tmp_path: Path) -> VllmBuild:
    """vLLM's Python, whose sender takes the CPU for a GPU."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {build.python} -I {HERE / "sender_on_cpu.py"} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return VllmBuild(python, build.version, build.environment)


def wanted_of(folder: Path) -> ServedVersion:
    nothing = Probe(None, (), torch.empty(0))  # type: ignore[arg-type]
    return ServedVersion("main", 3, "main/3/a", folder, "float32", CONTEXT, (), nothing)


async def test_vllms_trainer_side_meets_vllms_routes_and_every_worker_gets_every_weight(
    routes: dict[str, Routes], on_cpu: VllmBuild, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = served_folder(versions[1], tmp_path / "served")
    transfer = NcclTransfer("main", on_cpu, tmp_path / "nccl.log", ServingConfig(deadline_s=200, transfer="nccl"))
    pair, single = routes["pair"], routes["single"]
    async with Connections({}, timeout_s=200) as http:
        apis = [ServerApi(http, one.url, "main") for one in (pair, single)]
        assert [await api.transfer_backend() for api in apis] == ["nccl", "nccl"]
        await asyncio.gather(*[transfer.load(api, wanted_of(folder)) for api in apis])
    said = [json.loads(one.record.read_text(encoding="utf-8")) for one in (pair, single)]
    assert sorted(said[0]["ranks"] + said[1]["ranks"]) == [1, 2, 3]
    assert len(said[0]["ranks"]) == 2
    assert {one["label"] for one in said} == {"not main/3/a"}
    assert {one["mode"] for one in said} == {"abort"}
    expected = load_model(folder, torch.float32).state_dict()
    for one in (pair, single):
        received = load_file(one.record.with_suffix(".safetensors"))
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], weight) for name, weight in expected.items())


async def test_a_server_that_waits_for_one_that_failed_is_free_again_once_the_sender_has_ended(
    routes: dict[str, Routes], on_cpu: VllmBuild, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = served_folder(versions[1], tmp_path / "served")
    transfer = NcclTransfer("main", on_cpu, tmp_path / "nccl.log", ServingConfig(deadline_s=200, transfer="nccl"))
    single, broken = routes["single"], routes["broken"]
    single.record.unlink(missing_ok=True)
    async with Connections({}, timeout_s=200) as http:
        apis = [ServerApi(http, one.url, "main") for one in (single, broken)]
        failed = await asyncio.gather(*[transfer.load(one, wanted_of(folder)) for one in apis], return_exceptions=True)
        assert all(isinstance(one, ServerUnfitError) and f"{broken.url}/init_weight" in str(one) for one in failed)
        await asyncio.to_thread(wait_until_free, single, 30)  # vLLM itself would wait for 300 s
        await transfer.load(apis[0], wanted_of(folder))
    assert json.loads(single.record.read_text(encoding="utf-8"))["ranks"] == [1]


async def test_a_server_without_the_flag_is_told_from_one_with_it(
    routes: dict[str, Routes], on_cpu: VllmBuild, tmp_path: Path
) -> None:
    transfer = NcclTransfer("main", on_cpu, tmp_path / "nccl.log", ServingConfig(transfer="nccl"))
    async with Connections({}, timeout_s=200) as http:
        url = routes["without"].url
        with pytest.raises(ConfigError, match=f"nccl, but {url} was started with no weight transfer.*mgrpo serve main"):
            await transfer.check(ServerApi(http, url, "main"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to send from")
async def test_the_sender_says_that_it_needs_a_gpu(build: VllmBuild, tmp_path: Path) -> None:
    sender = await SenderProcess.start(build, "main", tmp_path / "log")
    try:
        with pytest.raises(
            ConfigError, match=r"policies\.main\.serving\.transfer: nccl, but .*python.* sees no CUDA GPU"
        ):
            await sender.hear()
    finally:
        await sender.kill()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU to send from, and one for the server")
def test_a_version_sent_by_nccl_is_proven(
    build: VllmBuild,
    versions: tuple[Path, Path],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the server on the second GPU, the sender on the first
    start = served_folder(versions[0], tmp_path / "start")
    settings = ServerSettings("main", start, "float32", CONTEXT, "127.0.0.1", _free_ports(1)[0], nccl=True)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    with ServerProcess(build, settings, tmp_path / "vllm.log") as server:
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "0")
        server.wait_until_it_answers(500)
        serving = ServingConfig(deadline_s=120, transfer="nccl")
        with VllmPolicyClient(
            "main",
            CONTEXT,
            [server.url],
            dtype="float32",
            serving=serving,
            tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False),
            label_of=lambda version: f"main/{version}/a",
            scratch=tmp_path / "served",
            transfer=NcclTransfer("main", build, tmp_path / "nccl.log", serving),
        ) as client:
            for version in (1, 0, 1):
                client.load(version, versions[version])
                assert client.publications[0].gap.most < 1e-4
                assert client.publications[0].loaded_bytes > 0
