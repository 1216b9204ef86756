"""Who moved a policy: the ranking from the tables, and exact gradients from the stored policy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import Qwen3ForCausalLM

from infra.blame.made_by import iteration_that_made
from infra.blame.ranking import BlameReport, blame
from infra.blame.render import render_blame
from infra.store.files import StoreFiles
from infra.store.manifests import PolicyStep, commit_manifest
from mgrpo_core.errors import ConfigError
from tests.flows.stored import iteration_folder, rows_of
from tests.infra.store.small_run import make_version, manifest, start_run

AGENT = {"main": "main", "sub": "searcher"}


def test_an_iteration_without_signal_kept_the_version(run, trained, capsys):
    """In the second iteration of this run the searcher's groups are all alike."""
    report = blame(run, "sub", store=str(trained), iteration=1)
    assert (report.from_version, report.to_version, report.in_loss) == (1, 1, 0)
    render_blame(report, Console(width=120))
    shown = capsys.readouterr().out
    assert "version 1 kept: nothing to train on" in shown
    assert "not in the loss, zero variance" in shown


@pytest.mark.parametrize("policy", AGENT)
def test_trajectories_are_ranked_by_what_the_tables_say(run, trained, policy):
    found = blame(run, policy, store=str(trained), iteration=0, top=1000)
    credit = [row for row in rows_of(trained, "advantages") if row["agent"] == AGENT[policy]]
    pull_of = {row["trajectory_id"]: row["weight"] * row["advantage"] * row["included"] for row in credit}
    assert {one.trajectory_id: one.pull for one in found.ranked} == pull_of
    sizes = [abs(one.pull) for one in found.ranked]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert sum(one.share for one in found.ranked) == pytest.approx(1)
    assert (found.trajectories, found.in_loss) == (len(credit), sum(row["included"] for row in credit))
    assert (found.from_version, found.to_version) == (0, 1)
    paths = {row["trajectory_id"]: row["agent_path"] for row in rows_of(trained, "rewards")}
    assert all(one.agent_path == paths[one.trajectory_id] for one in found.ranked)


@pytest.fixture(scope="module", params=AGENT)
def with_gradients(request, run, trained, tmp_path_factory) -> BlameReport:
    cache = tmp_path_factory.mktemp("cache")
    return blame(run, request.param, store=str(trained), iteration=0, top=1000, gradients=True, cache=cache)


def test_shares_of_the_step_are_of_the_gradient_that_the_update_measured(with_gradients):
    whole, ranked = with_gradients.whole, with_gradients.ranked
    assert whole.optimizer_steps == 1
    assert whole.norm == pytest.approx(whole.run_norm, rel=1e-5)  # float32, added up in other micro-batches
    assert sum(one.gradient.share for one in ranked) == pytest.approx(1, abs=1e-5)
    norms = [one.gradient.norm for one in ranked]
    assert norms == sorted(norms, reverse=True)


def test_what_is_not_in_the_loss_or_has_no_advantage_has_no_gradient(with_gradients):
    silent = [one for one in with_gradients.ranked if not one.pull]
    assert silent or with_gradients.policy == "main"  # one of whose two groups would have to be all alike
    assert all(one.gradient.norm == 0 and one.gradient.cosine is None for one in silent)
    assert all(one.gradient.norm > 0 for one in with_gradients.ranked if one.pull)


def test_a_gradient_is_that_of_the_trajectorys_term_written_out(with_gradients, trained):
    """At ratio 1 a trajectory's part is the gradient of - w A mean_t log p / sum w over all."""
    policy = with_gradients.policy
    first = with_gradients.ranked[0]
    model = Qwen3ForCausalLM.from_pretrained(trained / f"r/policies/{policy}/00000000")
    total = sum(row["weight"] for row in rows_of(trained, "advantages") if row["included"] and row["policy"] == policy)
    (row,) = [
        row
        for row in rows_of(trained, f"trajectories/{AGENT[policy]}-0000")
        if row["trajectory_id"] == first.trajectory_id
    ]
    scores = torch.log_softmax(model(torch.tensor([row["token_ids"]])).logits[0].double(), -1)
    sampled = [scores[t - 1, one] for t, one in enumerate(row["token_ids"]) if row["loss_mask"][t]]
    (-first.pull * torch.stack(sampled).mean() / total).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double().norm()
    assert first.gradient.norm == pytest.approx(float(norm), rel=1e-4)  # float32 weights


def test_named_trajectories_are_taken_whatever_their_rank(run, trained):
    last = blame(run, "sub", store=str(trained), top=1000).ranked[-1].trajectory_id
    (found,) = blame(run, "sub", store=str(trained), named=[last[:12]]).ranked
    assert found.trajectory_id == last
    for wrong in ("", "nothing"):
        with pytest.raises(ConfigError, match="none of them among"):
            blame(run, "sub", store=str(trained), named=[wrong])


def test_the_newest_version_is_meant_where_none_is_given(run, trained):
    assert blame(run, "main", store=str(trained)).to_version == 2
    assert blame(run, "main", store=str(trained), version=1).iteration == 0


def test_an_iteration_that_kept_a_version_made_none(tmp_path):
    files = StoreFiles(str(tmp_path / "store"))
    run = start_run(files, "r", tmp_path / "scratch")
    first, *_ = versions = [make_version(files, "r", "sub", v, tmp_path / "scratch", inputs=str(v)) for v in range(3)]
    assert first.version == 0
    parent = None
    for iteration, (before, after) in enumerate([(0, 0), (0, 1), (1, 1), (1, 1), (1, 2), (2, 2)]):
        steps = {"sub": PolicyStep("sub", before, after, find(files, versions, after))}
        parent = commit_manifest(files, manifest("r", iteration, {}, steps, parent))
    assert [iteration_that_made(run, "sub", version) for version in (1, 2, None)] == [1, 4, 4]
    with pytest.raises(ConfigError, match="what the run started from"):
        iteration_that_made(run, "sub", 0)
    with pytest.raises(ConfigError, match="has versions 0 to 2, not 3"):
        iteration_that_made(run, "sub", 3)
    with pytest.raises(ConfigError, match=r"no policy 'main'\. It has sub"):
        iteration_that_made(run, "main", 1)


def find(files, versions, number: int) -> str:
    from infra.store.policies import require_version

    return require_version(files, "r", "sub", "sub", number).sha256


def test_links_name_the_trace(run, trained):
    (first,) = blame(run, "main", store=str(trained), top=1).to_json()["ranked"]
    path, rollout = first["agent_path"], first["rollout_index"]
    assert first["trace"]["command"] == (
        f"mgrpo inspect r 1 @{first['query_position']} --rollout {rollout} --agent {path} --store {trained}"
    )


def test_a_ranking_reads_no_token_and_loads_no_torch(trained):
    code = (
        "import sys, pyarrow.parquet as pq\n"
        "read = set()\n"
        "whole = pq.ParquetFile.read_row_group\n"
        "def noting(self, group, columns=None, **options):\n"
        "    read.update(columns or self.schema_arrow.names)\n"
        "    return whole(self, group, columns=columns, **options)\n"
        "pq.ParquetFile.read_row_group = noting\n"
        "from flows.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules\n"
        "assert not read & {'token_ids', 'logprobs', 'loss_mask', 'messages', 'turns', 'task'}, read\n"
    )
    for more in ([], ["--delegations"]):
        subprocess.run(
            [sys.executable, "-c", code, "blame", "r", "sub", "--store", str(trained), *more],
            check=True,
            capture_output=True,
        )


def test_hostile_names_are_shown_and_do_nothing(run, trained, capsys):
    from dataclasses import replace

    report = blame(run, "sub", store=str(trained), top=1)
    hostile = replace(report.ranked[0], query_id="[red]a\x1b[2J\x07[/red]\nb", excluded_reason="[link=x]\x1b]0;y\x07")
    render_blame(replace(report, ranked=(hostile,)), Console(highlight=False, force_terminal=True, width=150))
    shown = capsys.readouterr().out
    assert "[red]a\\x1b[2J\\x07[/red] b" in shown
    assert "\\x1b]0;y\\x07" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_the_command_says_what_there_is(program, trained):
    asked = {
        ("nobody", "sub"): "Runs there: r",
        ("r", "nothing"): "It has main, sub",
        ("r", "sub", "--iteration", "7"): "Committed: 0 to 1",
        ("r", "sub", "--iteration", "0", "--version", "1"): "Give one of them",
        ("r", "main", "--delegations"): "Policies of sub-agents: sub",
    }
    for words, answer in asked.items():
        ended = program.run("blame", *words, "--store", trained)
        assert (ended.code, answer in ended.err) == (2, True), ended.err
    ended = program.run("blame", "r", "sub", "--store", trained, "--json", "--top", 2)
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["ranked"]) == 2


def test_damage_is_told_with_exit_code_1(program, trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path: Path = iteration_folder(tmp_path, 1) / "advantages.parquet"
    path.write_bytes(path.read_bytes()[:100])
    ended = program.run("blame", "r", "main", "--store", tmp_path)
    assert ended.code == 1
    assert "advantages.parquet: not a whole Parquet file" in ended.err


def test_a_table_that_makes_no_sense_is_damage_too(program, trained, tmp_path):
    """Rewards of a query that the iteration has not: no reader's hash, schema or row count finds it."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = iteration_folder(tmp_path) / "rewards.parquet"
    rewards = pq.read_table(path)
    place = rewards.schema.get_field_index("query_id")
    other = pa.array(["never asked"] * rewards.num_rows)
    pq.write_table(rewards.set_column(place, rewards.schema.field(place), other), path)
    for words in (["blame", "r", "sub", "--iteration", 0, "--delegations"], ["inspect", "r", 0, "@0", "--rollout", 0]):
        ended = program.run(*words, "--store", tmp_path)
        assert (ended.code, "makes no sense" in ended.err) == (1, True), ended.err
