"""What a server is told about adapters: names that no two versions share, flags, and files."""

from pathlib import Path

import pytest

from infra.serving.vllm.build import VllmBuild
from infra.serving.vllm.command import ServerSettings, server_command, server_environment
from infra.serving.vllm.served_folder import served_adapter
from infra.serving.vllm.weight_label import base_label, weight_label
from infra.store.policies import PolicyBase, PolicyVersion

WHOLE = PolicyVersion("r", "main", "main", 0, "a" * 64, None, "i", {})
ADAPTER = PolicyVersion("r", "main", "main", 4, "b" * 64, "a" * 64, "i", {}, PolicyBase(0, "a" * 64))


def test_a_label_names_every_weight_and_tells_the_base():
    assert weight_label(WHOLE) == base_label(weight_label(WHOLE)) == "main/0/aaaaaaaaaaaa"
    assert weight_label(ADAPTER) == "main/0/aaaaaaaaaaaa+4/bbbbbbbbbbbb"
    assert base_label(weight_label(ADAPTER)) == weight_label(WHOLE)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_a_server_gets_room_for_the_policys_rank(rank, room):
    settings = ServerSettings("main", Path("/v"), "float32", 384, "127.0.0.1", 8000, lora_rank=rank)
    command = server_command(VllmBuild(Path("python"), "0.32.0"), settings)
    assert {"--enable-lora", f"--max-lora-rank={room}"} <= set(command)
    assert server_environment(VllmBuild(Path("python"), "0.32.0"), {})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_server_of_a_policy_without_adapters_has_none():
    settings = ServerSettings("main", Path("/v"), "float32", 384, "127.0.0.1", 8000)
    assert "--enable-lora" not in server_command(VllmBuild(Path("python"), "0.32.0"), settings)


def test_servers_elsewhere_get_the_adapters_two_files(tmp_path):
    (tmp_path / "version").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        (tmp_path / "version" / name).write_text(name)
    assert served_adapter(tmp_path / "version", tmp_path / "served") == tmp_path / "version"
    moved = served_adapter(tmp_path / "version", tmp_path / "served" / "main/0/a+1/b", moved=True)
    assert sorted(path.name for path in moved.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
