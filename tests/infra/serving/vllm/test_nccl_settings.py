"""`serving.transfer: nccl`: what is refused before any work, what it changes, and how servers are started for it."""

import copy
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from flows.cli import app
from flows.load_config import config_from
from infra.progress import ProgressBoard
from infra.resources import open_resources
from infra.serving.engines import EnginePlaces, engine_of
from infra.serving.vllm.build import PYTHON_VARIABLE, VllmBuild
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.command import ServerSettings, server_command
from infra.serving.vllm.nccl_transfer import NcclTransfer
from infra.store.runs import open_store
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError
from tests.flows.small_team import config_of, save_policies, save_queries

SOUND = config_of(Path("policies"), Path("queries.jsonl"))
URLS = ["http://gpu-1:8000"]
FLAG = '--weight-transfer-config={"backend": "nccl"}'


def config_with(transfer: str = "nccl", folder: str | None = None, **main: object) -> RunConfig:
    raw = copy.deepcopy(SOUND)
    raw["policies"]["main"] |= {"servers": URLS, "serving": {"transfer": transfer, "folder": folder}, **main}
    return RunConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lora": {"rank": 4}}, "nccl sends all weights, and this policy trains an adapter.*Use transfer: folder"),
        ({"servers": [*URLS, "local"]}, "nccl needs a GPU for the sender.*start it with `mgrpo serve`"),
        ({"folder": "/shared"}, "nccl and serving.folder '/shared': servers read no folder then. Remove one"),
        ({"transfer": "ipc"}, "'folder' or 'nccl'"),
    ],
)
def test_what_does_not_go_with_nccl_is_refused_before_any_work(wrong: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=rf"policies\.main\.serving\.transfer(: |\n.*){said}"):
        config_with(**wrong)
    if "transfer" not in wrong:
        config_with("folder", **wrong)


def test_how_weights_travel_is_no_part_of_what_a_run_is() -> None:
    assert config_with("folder").lineage_sha256() == config_with("nccl").lineage_sha256()
    assert RunConfig.model_validate(SOUND).policies["main"].serving.transfer == "folder"


def played_python(folder: Path) -> Path:
    """A Python that says it has vLLM's CUDA build, and writes down what it is asked to serve."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n*importlib*) echo vllm 0.32.0;;\n*) echo "$@" > {folder}/asked; exit 3;;\nesac\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python


def test_only_a_client_whose_policy_says_so_sends_by_nccl(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(played_python(tmp_path)))
    for transfer, kind in (("folder", type(None)), ("nccl", NcclTransfer)):
        engine = engine_of(config_with(transfer), "main", 384, tokenizer, EnginePlaces(str, tmp_path, tmp_path))
        assert isinstance(engine, VllmPolicyClient)
        assert isinstance(engine._transfer, kind)
        engine.close()


def test_without_vllm_here_there_is_nothing_to_send_with(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match=r"policies\.main\.serving\.transfer: nccl sends with vLLM's own code.*none: no"
    ):
        engine_of(config_with(), "main", 384, tokenizer, EnginePlaces(str, tmp_path, tmp_path))


@pytest.mark.parametrize("nccl", [True, False])
def test_a_server_is_started_with_the_engine_that_it_needs(nccl: bool) -> None:
    settings = ServerSettings("main", Path("/version"), "float32", 384, "127.0.0.1", 8000, nccl=nccl)
    assert (FLAG in server_command(VllmBuild(Path("python"), "0.32.0"), settings)) == nccl


@pytest.mark.parametrize("transfer", ["nccl", "folder"])
def test_mgrpo_serve_starts_it_as_the_runs_config_says(
    tmp_path: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(played_python(tmp_path)))
    folder = save_policies(tmp_path / "team")
    raw = config_of(folder, save_queries(folder / "queries.jsonl"))
    raw["policies"]["main"] |= {"servers": URLS, "serving": {"transfer": transfer}}
    store = tmp_path / "store"
    with open_resources(open_store(str(store)), "team", config_from(raw, "team"), progress=ProgressBoard(shown=False)):
        pass
    cache = str(tmp_path / "cache")
    done = CliRunner().invoke(app, ["serve", "main", "--run", "team", "--store", str(store), "--cache", cache])
    assert "ended with exit code 3" in done.stderr
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert (FLAG in asked) == (transfer == "nccl")
