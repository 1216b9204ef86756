"""Trajectories as JSON Lines: every line valid JSON, with what was asked, its reward and its advantage."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.portable.jsonl import export_jsonl
from infra.store.files import StoreFiles
from mgrpo_core.errors import ConfigError
from tests.infra.portable.conftest import ITERATIONS


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_has_a_line_a_trajectory_with_its_reward_and_advantage(store, tmp_path):
    assert export_jsonl(str(store), "r", str(tmp_path / "a.jsonl")) == ITERATIONS * 10
    lines = lines_of(tmp_path / "a.jsonl")
    assert len(lines) == ITERATIONS * 10  # 2 queries x (2 main + 1 + 2 calls)
    first = lines[0]
    assert (first["agent"], first["iteration"], first["question"], first["answers"]) == (
        "main",
        0,
        "What is it?",
        ["42"],
    )
    assert first["messages"] == [
        {"role": "user", "content": "What is it?", "name": None},
        {"role": "assistant", "content": "42", "name": None},
    ]
    assert first["reward"]["format"] == {"value": 1.0, "weight": 0.1}
    assert first["reward"]["expert"] == {"value": None, "weight": None}
    for line in lines:
        assert line["advantage"]["value"] == 2 * line["reward"]["total"] - 1
        assert "token_ids" not in line


def test_jsonl_has_tokens_where_they_are_asked_for_and_null_where_there_is_no_number(store, tmp_path):
    export_jsonl(str(store), "r", str(tmp_path / "a.jsonl"), iterations=[1], tokens=True)
    lines = lines_of(tmp_path / "a.jsonl")
    assert {line["iteration"] for line in lines} == {1}
    for line in lines:
        assert len(line["token_ids"]) == len(line["loss_mask"]) == len(line["logprobs"]) == 8
        assert [one is None for one in line["logprobs"]] == [not sampled for sampled in line["loss_mask"]]


def test_jsonl_is_not_replaced_either(store, tmp_path):
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_jsonl(str(store), "r", str(tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_text() == "mine"


def test_jsonl_goes_to_object_storage(store, s3_url):
    export_jsonl(str(store), "r", f"{s3_url}/a.jsonl", iterations=[0])
    assert len(StoreFiles(s3_url).read("a.jsonl").splitlines()) == 10
