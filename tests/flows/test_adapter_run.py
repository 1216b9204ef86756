"""A run that trains one policy by LoRA: small versions, a resume, and readers that find the same policy in them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from flows.load_config import config_from
from infra.progress import ProgressBoard
from infra.replay.iteration import replay_stored
from infra.replay.verdicts import Outcome
from infra.resources import open_resources
from infra.serving.vllm.local_servers import _free_ports
from infra.store import layout
from infra.store.policies import fetch_version, require_version
from infra.store.runs import open_store, require_run, resume_point
from infra.store.verify import verify_run
from mgrpo_core.errors import TableIntegrityError
from tasks.evaluate_policies import Decoding, evaluate_policies
from tests.flows.program import Program
from tests.flows.small_team import config_of
from tests.flows.stored import manifest_of, metrics_of, rows_of, versions_of
from tests.servers.stand_in_vllm import StandIn, Told, save_stand_in

OF_PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # 0.21's


@pytest.fixture(scope="module")
def trained(program: Program, team: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of one iteration, resumed by another process to make two more."""
    store = tmp_path_factory.mktemp("adapters")
    for iterations in (1, 3):
        ended = program.run(
            *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", iterations),
            *("--set", "policies.main.lora={rank: 2, alpha: 8}", "--set", "update.optimizer_steps=2"),
            *("--set", "policies.main.optimizer.lr=0.02", "--set", f"data.held_out={team / 'queries.jsonl'}"),
        )
        assert ended.code == 0, ended.err
    return store


def newest(store: Path, policy: str) -> int:
    return int(versions_of(store, policy)[-1])


def test_only_the_adapter_is_stored_and_the_base_stays(trained):
    assert len(versions_of(trained, "main")) > 1
    whole, *adapters = sorted((trained / "r/policies/main").iterdir())
    assert (whole / "model.safetensors").exists()
    for folder in adapters:
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json",
            "update.json", "version.json",
        ]  # fmt: skip
    size = (adapters[0] / "adapter_model.safetensors").stat().st_size
    assert size < (whole / "model.safetensors").stat().st_size / 4
    assert (trained / "r/policies/sub/00000001/model.safetensors").exists(), "the other policy trains all weights"


@pytest.mark.parametrize("iteration", range(3))
def test_every_iteration_replays_to_the_bit_also_the_one_after_the_resume(trained, iteration):
    report = replay_stored(str(trained), "r", iteration, "update")
    assert report.equal, report.conclusion()
    found = {verdict.stage: verdict for verdict in report.verdicts}
    assert found["update main"].outcome is Outcome.EQUAL
    step = manifest_of(trained, iteration)["policies"]["main"]
    if step["to_version"] > step["from_version"]:
        assert found["update main"].compared > 1000, "A, B and their moments"
    # the embedded engine sampled with the adapter merged, the trainer scores with it merged: two programs
    assert found["log-probs main"].outcome in (Outcome.CLOSE, Outcome.EQUAL)


def test_sampler_and_trainer_agree_on_a_policy_with_an_adapter(trained):
    for iteration in range(3):
        assert metrics_of(trained, iteration)["update/main/mismatch_max"] < 1e-4


def test_the_run_verifies_and_a_changed_base_does_not(trained, tmp_path):
    run = require_run(open_store(str(trained)), "r")
    assert verify_run(run).sound
    assert resume_point(run).iteration == 3
    copy = Path(shutil.copytree(trained, tmp_path / "store"))
    file = copy / "r/policies/main/00000000/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = require_run(open_store(str(copy)), "r")
    assert verify_run(damaged).usable_through == -1
    with pytest.raises(TableIntegrityError, match=r"version 0 of policy 'main' is damaged.*Nothing was changed"):
        resume_point(damaged)


def folder_of(store: Path, policy: str, version: int, cache: Path) -> Path:
    """A version as its readers get it."""
    files = open_store(str(store))
    return fetch_version(files, require_version(files, "r", policy, policy, version), cache)


def read_by_peft(folder: Path) -> Any:
    """The base with A and B on it, which alone have gradients."""
    from peft import PeftModel

    return PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(folder / "base"), folder, is_trainable=True)


@OF_PEFT
async def test_evaluate_scores_as_a_team_of_the_merged_weights_does(program, team, trained, tmp_path, monkeypatch):
    ended = program.run("evaluate", "r", "--store", trained, "--samples", 16, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["after"] == 3
    main, sub = (folder_of(trained, one, newest(trained, one), tmp_path / "cache") for one in ("main", "sub"))
    own = shutil.ignore_patterns("version.json", "update.json", "optimizer.safetensors", "trainer_state.json")
    shutil.copytree(sub, tmp_path / "sub", ignore=own)
    shutil.copytree(main / "base", tmp_path / "main", ignore=own)
    read_by_peft(main).merge_and_unload().save_pretrained(tmp_path / "main")
    config = config_of(tmp_path, team / "queries.jsonl")
    config["data"]["held_out"] = str(team / "queries.jsonl")
    # Noise follows from how many iterations there were: those of the whole weights are 3 as well, by the manifest.
    monkeypatch.setattr("tasks.evaluate_policies.read_manifest", lambda *_: None)
    files = open_store(str(tmp_path / "store"))
    with open_resources(files, "r", config_from(config, "r"), progress=ProgressBoard(shown=False)) as resources:
        for decoding in (Decoding(16, 1.0), Decoding(1, 0.0)):
            merged = await evaluate_policies.fn(resources, 3, decoding, None)
            found = layout.evaluation_file("r", 3, f"6x{decoding.samples}-t{decoding.temperature:g}")
            assert json.loads((trained / found).read_text())["scores"] == merged.scores


@pytest.mark.parametrize("iteration", range(3))
def test_a_what_if_goes_on_from_where_the_update_did(program, trained, iteration):
    """With the run's own settings it is the run's update: same gradient, same version."""
    rates = ("--set", "policies.main.optimizer.lr=[0.02, 0.04]")
    ended = program.run("replay", "r", iteration, "--store", trained, *rates, "--json")
    assert ended.code == 0, ended.err
    same, faster = (tried["policies"] for tried in json.loads(ended.out)["tried"])
    step = manifest_of(trained, iteration)["policies"]["main"]
    for one, other in zip(same, faster, strict=True):
        if one["policy"] == "main" and step["to_version"] > step["from_version"]:
            assert one["optimizer_steps"] == other["optimizer_steps"] == 2
            assert one["cosine"] == pytest.approx(1, abs=1e-12)
            assert one["norm"] == one["stored_norm"] == other["norm"] > 0
            assert one["approx_kl"] == 0 < other["approx_kl"]


@OF_PEFT
def test_blame_counts_in_gradients_of_the_adapter(program, trained, tmp_path):
    iteration = next(one for one in (1, 2) if manifest_of(trained, one)["policies"]["main"]["to_version"] > 1)
    ended = program.run(
        *("blame", "r", "main", "--iteration", iteration, "--gradients", "--top", 1000),
        *("--store", trained, "--json"),
    )
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert sum(one["gradient"]["share"] for one in report["ranked"]) == pytest.approx(1, abs=1e-5)
    first = report["ranked"][0]
    (row,) = (
        row
        for row in rows_of(trained, "trajectories/main-0000", iteration)
        if row["trajectory_id"] == first["trajectory_id"]
    )
    # At ratio 1 a trajectory's part is the gradient of - w A mean_t log p / sum w over all.
    model = read_by_peft(folder_of(trained, "main", report["from_version"], tmp_path / "cache"))
    scores = torch.log_softmax(model(torch.tensor([row["token_ids"]])).logits[0].double(), -1)
    sampled = [scores[t - 1, one] for t, one in enumerate(row["token_ids"]) if row["loss_mask"][t]]
    total = sum(one["weight"] for one in report["ranked"] if one["excluded_reason"] is None)
    (torch.stack(sampled).mean() * first["pull"] / total).backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = torch.cat([one.flatten() for one in gradients]).double().norm()
    assert first["gradient"]["norm"] == pytest.approx(float(norm), rel=1e-4)  # float32 weights


def test_blame_counts_delegations_of_the_other_policy(program, trained):
    ended = program.run("blame", "r", "sub", "--delegations", "--iteration", 0, "--store", trained, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["as_stored"]


@pytest.fixture
def vllm(tmp_path: Path) -> StandIn:
    return save_stand_in(tmp_path)


def served(program: Program, vllm: StandIn, store: Path, policy: str, *options: object) -> Told:
    """What `mgrpo serve` starts, and tells it."""
    ended = program.run(
        *("serve", policy, "--run", "r", "--store", store, "--port", _free_ports(1)[0]),
        *("--python", vllm.python, "--cache", vllm.python.parent / "cache", *options),
    )
    assert ended.code == 0, ended.err
    return vllm.told()


def test_serve_gives_vllm_the_base_room_for_the_adapter_and_the_adapter_under_its_label(program, trained, vllm):
    told = served(program, vllm, trained, "main")
    assert "--enable-lora" in told.options
    assert told.options["--max-lora-rank"] == "8", "vLLM has no room for 2 alone"
    base = Path(told.options["--model"])
    assert [path.name for path in base.glob("*.safetensors")] == ["model.safetensors"]
    whole = trained / "r/policies/main/00000000/model.safetensors"
    assert (base / "model.safetensors").read_bytes() == whole.read_bytes()
    (_, loaded), (_, labelled) = told.posts
    assert [route for route, _ in told.posts] == ["/v1/load_lora_adapter", "/update_weight_version"]
    version = newest(trained, "main")
    assert loaded["lora_name"] == labelled["new_version"]
    assert f"+{version}/" in loaded["lora_name"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        own = trained / f"r/policies/main/{version:08d}" / name
        assert (Path(loaded["lora_path"]) / name).read_bytes() == own.read_bytes()


@pytest.mark.parametrize(("policy", "options", "room"), [("main", ["--version", 0], True), ("sub", [], False)])
def test_serve_gives_whole_versions_as_they_are(program, trained, vllm, policy, options, room):
    told = served(program, vllm, trained, policy, *options)
    assert ("--enable-lora" in told.options) is room, "the policy's next version is an adapter"
    assert [route for route, _ in told.posts] == ["/update_weight_version"]


def test_a_run_that_turns_lora_off_goes_on_from_its_adapter_which_can_still_be_served(
    program, team, trained, tmp_path, vllm
):
    store = shutil.copytree(trained, tmp_path / "store")
    ended = program.run(
        *("train", team / "run.yaml", "--run", "r", "--store", store, "--iterations", 5, "--accept-config-change"),
        *("--set", "update.optimizer_steps=2", "--set", f"data.held_out={team / 'queries.jsonl'}"),
    )
    assert ended.code == 0, ended.err
    steps = {iteration: manifest_of(store, iteration)["policies"]["main"] for iteration in (3, 4)}
    iteration, step = next((at, step) for at, step in steps.items() if step["to_version"] > step["from_version"])
    before, made = (store / f"r/policies/main/{step[one]:08d}" for one in ("from_version", "to_version"))
    assert (before / "adapter_model.safetensors").exists()
    assert (made / "model.safetensors").exists()
    report = replay_stored(str(store), "r", iteration, "update")
    assert report.equal, report.conclusion()
    told = served(program, vllm, store, "main", "--version", step["from_version"])
    assert told.options.get("--max-lora-rank") == "8"
    assert [route for route, _ in told.posts] == ["/v1/load_lora_adapter", "/update_weight_version"]
