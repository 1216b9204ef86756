"""Case C2, a whole iteration: a chat template that drops reasoning stops the run, or is accepted, exactly trained."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.flows.small_team import BLUE, RED, ask, config_of, save_config, save_policy
from tests.flows.stored import iteration_folder, metrics_of, rows_of, versions_of

THINKS = "<think>hm</think>"


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A main policy that thinks before it asks, with a template that shows it only what followed the thought."""
    folder = tmp_path_factory.mktemp("forgetful") / "main"
    save_policy(folder, {THINKS + ask("searcher"): 0.6, RED: 0.2, BLUE: 0.2}, seed=8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = "{{ message['content'] }}"
    assert said in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(said, "{{ message['content'].split('</think>')[-1] }}")
    tokenizer.save_pretrained(folder)
    return folder


def test_c2_rewritten_history_is_refused_with_the_template_named_and_trained_as_segments_where_accepted(
    program, team, forgetful, tmp_path
):
    config = config_of(team, team / "queries.jsonl")
    config["policies"]["main"]["init"] = str(forgetful)
    store = tmp_path / "store"

    def train():
        return program.run("train", save_config(tmp_path / "run.yaml", config), "--run", "r", "--store", store)

    refused = train()
    assert refused.code == 1
    for words in (
        "HistoryRewrittenError: r-0000: ",
        "later prompts of 'main' (100%) do not extend, id for id, what policy 'main' had seen and sampled",
        "at most 10% may be so (rollout.max_rewritten_share)",
        f"The chat template of policies.main.init ({forgetful}) rewrites earlier turns, first at turn 2 of main, query",
        "give the policy's tokenizer a template that keeps what was said",
        "rollout.max_rewritten_share: 1, and start again",
    ):
        assert words in refused.err
    assert not (iteration_folder(store) / "manifest.json").exists()
    assert versions_of(store, "main") == ["00000000"]
    staged = {path.name: path.stat().st_mtime_ns for path in (iteration_folder(store) / "staging").rglob("*.parquet")}
    assert staged

    config["rollout"]["max_rewritten_share"] = 1.0
    accepted = train()  # the same run: the bound is no part of what it is
    assert accepted.code == 0, accepted.err
    metrics = metrics_of(store)
    assert (metrics["main/rewritten_share"], metrics["searcher/rewritten_share"]) == (1.0, 0.0)
    segmented = [row for row in rows_of(store, "trajectories/main-0000") if len(row["segment_starts"]) > 1]
    assert segmented
    for row in segmented:
        # one segment a turn, and what is trained in each is what was sampled in it
        assert len(row["segment_starts"]) >= len(row["turns"])
        sampled = {place for turn in row["turns"] for place in range(turn["start"], turn["stop"])}
        assert {place for place, on in enumerate(row["loss_mask"]) if on} == sampled
    # were a segment trained in another context than the policy saw, its log-probs would differ
    assert metrics["update/main/mismatch_max"] < 1e-4
