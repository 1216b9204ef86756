"""What-if: its figures are those of a run that was really made with those settings from the same rollouts."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3ForCausalLM

from infra.replay.overrides import variations
from infra.replay.render_what_if import render_what_if, what_if_markdown
from infra.replay.what_if import WhatIf, advantages_under, what_if_stored
from infra.replay.what_if_picture import what_if_png
from infra.store.runs import open_store, require_run
from infra.store.schemas import TRAJECTORIES
from infra.store.staging import stage_group
from infra.store.stored_iteration import open_stored
from infra.store.tables import read_table
from infra.store.trajectory_rows import trajectories_of
from mgrpo_core.errors import ConfigError
from mgrpo_core.trajectories import Rollout, Trajectory
from tests.flows.program import Program
from tests.flows.small_team import config_of, save_config
from tests.flows.stored import iteration_folder, tables_sha256
from tests.flows.stored import rows_of as rows

SETTINGS = {
    "four slots, centred": ["alignment.d=4", "advantage.normalization=center"],
    "other weights, rate and reduction": [
        "agents.searcher.reward.main_correct=0.1",
        "optimizer.lr=0.02",
        "loss.reduction=token_mean",
    ],
    "another judge, by import path": [
        "agents.searcher.judge=mgrpo_core.rewards.rule_judge:SupportJudge",
        "agents.searcher.reward={format: 0.2, main_correct: 0.3, expert: 0.5}",
    ],
    "weighted, a pull to the start, a narrow clip": [
        "alignment.mode=weighted",
        "loss.kl.coefficient=0.5",
        "loss.clip_low=0.01",
        "loss.clip_high=0.01",
        "update.epochs=3",
    ],
}


@pytest.fixture(scope="module")
def stored(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one iteration, both policies updated."""
    store = tmp_path_factory.mktemp("stored")
    _train(program, save_config(store / "run.yaml", config_of(team, team / "queries.jsonl")), store)
    return store


def _train(program: Program, config: Path, store: Path) -> None:
    ended = program.run("train", config, "--run", "r", "--store", store, "--iterations", 1)
    assert ended.code == 0, ended.err


def _opened(store: Path) -> Any:
    return open_stored(require_run(open_store(str(store)), "r"), 0)


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def tried(request: Any, program: Program, stored: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The what-if, and the store of a run that was made with its settings from the same staged groups."""
    settings: list[str] = request.param
    found = what_if_stored(str(stored), "r", 0, settings, "update")
    store = tmp_path_factory.mktemp("made")
    (variation,) = variations(_opened(stored).config, settings)
    _stage(stored, store)
    _train(program, save_config(store / "run.yaml", variation.config.model_dump(mode="json")), store)
    return variation, found, store


def _stage(stored: Path, store: Path) -> None:
    """Put the rollouts of a committed iteration where a new run finds them."""
    at, files = _opened(stored), open_store(str(store))
    by_rollout: dict[tuple[int, int], list[Trajectory]] = {}
    for refs in at.all_shards().values():
        table = read_table(at.files, [ref.path for ref in refs], TRAJECTORIES)
        for position, one in zip(table.column("query_position").to_pylist(), trajectories_of(table), strict=True):
            by_rollout.setdefault((position, one.key.rollout_index), []).append(one)
    for position in {position for position, _ in by_rollout}:
        rollouts = [
            Rollout(found[0].key.query_id, index, tuple(found))
            for (of, index), found in sorted(by_rollout.items())
            if of == position
        ]
        stage_group(files, "r", 0, position, rollouts)


def test_the_run_was_made_from_the_same_rollouts(stored, tried):
    _, _, store = tried
    ours, theirs = tables_sha256(stored), tables_sha256(store)
    assert {name: one for name, one in ours.items() if "trajectories" in name} == {
        name: one for name, one in theirs.items() if "trajectories" in name
    }
    assert ours["advantages.parquet"] != theirs["advantages.parquet"]


def test_credit_is_that_of_the_run_row_by_row(stored, tried):
    variation, found, store = tried
    advantages = asyncio.run(advantages_under(_opened(stored), variation.config))
    made = pq.read_table(iteration_folder(store) / "advantages.parquet")
    assert advantages.to_pylist() == made.to_pylist()

    before = {row["trajectory_id"]: row for row in rows(stored, "advantages")}
    for change in found.tried[0].agents:
        own = [(before[row["trajectory_id"]], row) for row in rows(store, "advantages") if row["agent"] == change.agent]
        assert change.trajectories == len(own)
        assert change.included == sum(then["included"] for then, _ in own)
        assert change.included_now == sum(now["included"] for _, now in own)
        assert change.sign_changes == sum(then["advantage"] * now["advantage"] < 0 for then, now in own)
        signal = [{pair[side]["query_id"] for pair in own if pair[side]["included"]} for side in (0, 1)]
        assert (change.gained, change.lost) == (len(signal[1] - signal[0]), len(signal[0] - signal[1]))


def test_figures_of_the_updates_are_those_of_the_run(stored, tried):
    variation, found, store = tried
    for change in found.tried[0].policies:
        ours, theirs = (_figures(one, change.policy) for one in (stored, store))
        assert change.optimizer_steps == theirs["optimizer_steps"]
        assert change.stored_norm == pytest.approx(ours["grad_norm"], rel=1e-6)
        if variation.config.update.epochs == 1:  # else the run's figure is a mean over steps
            assert change.norm == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert change.clip_fraction == sum(theirs[f"clip_fraction_{bound}"] for bound in ("low", "high", "dual"))
        if "loss.clip_high=0.01" in found.tried[0].changes:
            assert change.clip_fraction > 0, "else this compares zeros"
        assert change.stored_clip_fraction == sum(ours[f"clip_fraction_{bound}"] for bound in ("low", "high", "dual"))


def test_the_kl_is_that_between_the_two_runs_policies(stored, tried):
    _, found, store = tried
    for change in found.tried[0].policies:
        agent = {"main": "main", "sub": "searcher"}[change.policy]
        models = [
            Qwen3ForCausalLM.from_pretrained(one / f"r/policies/{change.policy}/00000001") for one in (stored, store)
        ]
        terms: list[float] = []
        for row in rows(stored, f"trajectories/{agent}-0000"):
            base, new = (_logprobs(model, row) for model in models)
            terms += [float(torch.expm1(n - b) - (n - b)) for b, n in zip(base, new, strict=True)]
        assert change.approx_kl == pytest.approx(sum(terms) / len(terms), rel=1e-3, abs=1e-12)  # float32 log-probs


def _logprobs(model: Any, row: dict[str, Any]) -> list[torch.Tensor]:
    """Of the sampled tokens, the plain way."""
    with torch.no_grad():
        logits = model(torch.tensor([row["token_ids"]])).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    return [scores[t - 1, token] for t, token in enumerate(row["token_ids"]) if row["loss_mask"][t]]


def test_the_cosine_is_that_of_gradients_written_out(stored):
    """At ratio 1 the gradient of the loss is that of - sum_i w_i A_i mean_t log p / sum_i w_i."""
    (tried,) = what_if_stored(str(stored), "r", 0, ["alignment.d=4", "advantage.normalization=center"], "update").tried
    (variation,) = variations(_opened(stored).config, ["alignment.d=4", "advantage.normalization=center"])
    after = asyncio.run(advantages_under(_opened(stored), variation.config)).to_pylist()
    for change in tried.policies:
        agent = {"main": "main", "sub": "searcher"}[change.policy]
        one, other = (_gradient(stored, agent, change.policy, table) for table in (rows(stored, "advantages"), after))
        cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
        assert change.cosine == pytest.approx(cosine, abs=1e-6)
        assert change.norm == pytest.approx(float(other.norm()), rel=1e-4)
    assert any(change.cosine < 0.999 for change in tried.policies)


def _gradient(store: Path, agent: str, policy: str, advantages: Sequence[dict[str, Any]]) -> torch.Tensor:
    model: Any = Qwen3ForCausalLM.from_pretrained(store / f"r/policies/{policy}/00000000")
    credit = {row["trajectory_id"]: row for row in advantages if row["included"]}
    loss, total = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows(store, f"trajectories/{agent}-0000"):
        if row["trajectory_id"] in credit:
            own = credit[row["trajectory_id"]]
            scores = torch.log_softmax(model(torch.tensor([row["token_ids"]])).logits[0].double(), -1)
            sampled = [scores[t - 1, one] for t, one in enumerate(row["token_ids"]) if row["loss_mask"][t]]
            loss = loss - own["weight"] * own["advantage"] * torch.stack(sampled).mean()
            total += own["weight"]
    (loss / total).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def _figures(store: Path, policy: str) -> dict[str, Any]:
    return json.loads((iteration_folder(store) / f"updates/{policy}.json").read_text())["figures"]


@pytest.fixture(scope="module")
def grid(stored: Path) -> WhatIf:
    settings = ["alignment.d=[1, 2]", "advantage.normalization=[population, center, leave_one_out]"]
    return what_if_stored(str(stored), "r", 0, settings, "advantages")


def test_lists_make_a_grid_with_the_stored_settings_at_home_in_it(grid):
    assert [tried.changes for tried in grid.tried][:2] == [
        ("alignment.d=1", "advantage.normalization=population"),
        ("alignment.d=1", "advantage.normalization=center"),
    ]
    assert len(grid.tried) == 6
    home = grid.tried[3]  # d = 2, population: the small team's own
    assert all(one.mean_change == one.sign_changes == one.gained == one.lost == 0 for one in home.agents)
    assert any(one.mean_change > 0 for one in grid.tried[4].agents)


def test_a_what_if_is_shown_as_tables_and_as_a_picture(grid, capsys):
    render_what_if(grid)
    assert "leave_one_out" in capsys.readouterr().out
    assert what_if_markdown(grid).count("\n|") == 2 + 12
    assert what_if_png(grid).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("seed=3", "cannot be tried"),
        ("agents.searcher.prompt=x", "cannot be tried"),
        ("loss.clip=0.1", "loss.clip"),
        ("agents.nobody.d=2", "'nobody'"),
        ("alignment.mode=never", "alignment.mode"),
        ("alignment.d", "expected key=value"),
    ],
)
def test_what_cannot_be_tried_on_stored_rollouts_is_refused(stored, setting, words):
    with pytest.raises(ConfigError, match=words):
        what_if_stored(str(stored), "r", 0, [setting], "advantages")


def test_a_setting_given_twice_is_refused(stored):
    with pytest.raises(ConfigError, match="as a list"):
        what_if_stored(str(stored), "r", 0, ["alignment.d=1", "alignment.d=2"], "advantages")
