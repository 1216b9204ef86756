"""A team whose agents are different LLMs: main is a Qwen3, the searcher a Llama with a tokenizer of its own."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.flows.llama_policy import save_llama
from tests.flows.small_team import MAIN_SAYS, SUB_SAYS, config_of, save_policy, save_queries
from tests.flows.stored import metrics_of, rows_of, versions_of


def save_two_families(folder: Path) -> Path:
    """The folder of policies `main` and `sub`, and of `queries.jsonl`."""
    save_policy(folder / "main", MAIN_SAYS, seed=1)
    save_llama(folder / "sub", SUB_SAYS, seed=2)
    save_queries(folder / "queries.jsonl")
    return folder


def config_of_two_families(folder: Path) -> dict[str, Any]:
    config = config_of(folder, folder / "queries.jsonl")
    # a Llama 3 prompt says more about whose turn it is
    config["agents"]["searcher"]["limits"] |= {"max_observation_tokens": 32}
    return config


def check_that_each_kept_to_its_own_family(store: Path) -> None:
    """Of a committed first iteration: rows, versions and log-probs of both."""
    tokenizers = {
        policy: AutoTokenizer.from_pretrained(store / "r" / "policies" / policy / "00000001")
        for policy in ("main", "sub")
    }
    kinds = {
        policy: (store / "r" / "policies" / policy / "00000001" / "config.json").read_text()
        for policy in ("main", "sub")
    }
    assert '"model_type": "qwen3"' in kinds["main"]
    assert '"model_type": "llama"' in kinds["sub"]
    assert versions_of(store, "main") == versions_of(store, "sub") == ["00000000", "00000001"]

    said = {"main": set(), "sub": set()}
    by_id = {}
    for agent, policy in (("main", "main"), ("searcher", "sub")):
        for row in rows_of(store, f"trajectories/{agent}-0000"):
            by_id[row["trajectory_id"]] = row
            for turn in row["turns"]:
                said[policy].add(tokenizers[policy].decode(row["token_ids"][turn["start"] : turn["stop"]]))
    # every turn reads in its own tokenizer, up to one slip of the tongue in thousands
    assert {text for text in said["main"] if text.endswith("<|im_end|>")} <= {f"{one}<|im_end|>" for one in MAIN_SAYS}
    assert {text for text in said["sub"] if text.endswith("<|eot_id|>")} <= {f"{one}<|eot_id|>" for one in SUB_SAYS}
    assert not {"<|eot_id|>", "<|im_end|>"} & set(tokenizers["main"].get_vocab()) & set(tokenizers["sub"].get_vocab())

    # case C4: the template writes the BOS, and nobody adds another; were it so, the log-probs below would part
    bos = tokenizers["sub"].bos_token_id
    assert {row["token_ids"].count(bos) for row in by_id.values() if row["agent"] == "searcher"} == {1}

    answered = [row for row in by_id.values() if row["agent"] == "searcher" and row["reply"] is not None]
    assert answered
    for row in answered:
        parent = by_id[row["parent_id"]]
        # what crosses between the two is text: each encodes it its own way
        assert row["reply"] in [message["content"] for message in parent["messages"] if message["role"] == "tool"]
        assert row["task"] == "which colour"
        assert row["messages"][1]["content"] == "which colour"
    ids = {policy: one.encode("which colour", add_special_tokens=False) for policy, one in tokenizers.items()}
    assert ids["main"] != ids["sub"]

    metrics = metrics_of(store)
    for policy in ("main", "sub"):
        assert metrics[f"update/{policy}/optimizer_steps"] == 1
        assert metrics[f"update/{policy}/mismatch_max"] < 1e-4
        assert metrics[f"update/{policy}/missing_sampler_tokens"] == 0
