"""What Prefect is told and what it does: failures reach the flow, retries repeat no effect, little crosses its API."""

import asyncio
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType, TaskRun

import infra.training.policy_update
import tasks.commit_iteration
import tasks.roll_out
from flows.iteration import iteration
from flows.load_config import load_config
from flows.process import keep_open
from infra.stage_clock import StageClock
from tasks.stage import stage
from tests.flows.program import Trap
from tests.flows.stored import iteration_folder, manifest_of, rows_of, versions_of

# Open, rollouts of two agents, materialise, score, align, advantages, updates of two policies, measure, commit,
# publish, report.
STAGES = 13


async def _flow_run(name: str, state: StateType) -> FlowRun:
    async with get_client() as client:
        named = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
    found = [one for one in named if one.state_type == state]
    assert len(found) == 1, f"flow runs {name}: {[one.state_type for one in named]}"
    return found[0]


async def _task_states(run: FlowRun, count: int) -> list[StateType | None]:
    """States of a flow run's tasks, once `count` have a final one: they reach the server as events, a little later."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    states: list[StateType | None] = []
    for _ in range(200):
        async with get_client() as client:
            found: list[TaskRun] = await client.read_task_runs(flow_run_filter=of_run)
        states = [one.state_type for one in found]
        if len(states) >= count and all(state in TERMINAL_STATES for state in states):
            break
        await asyncio.sleep(0.1)
    return states


@pytest.fixture(scope="session")
def trained(program, team, tmp_path_factory) -> Path:
    """A store with one iteration of the run `told`, 2 queries x 4 rollouts."""
    store = tmp_path_factory.mktemp("told")
    ended = program.run("train", team / "run.yaml", "--run", "told", "--store", store)
    assert ended.code == 0, ended.err
    return store


async def test_f1_an_update_that_raises_fails_the_flow_and_publishes_nothing(program, team, tmp_path):
    trap = Trap("infra.training.policy_update:train_policy", action="raise")
    ended = program.run("train", team / "run.yaml", "--run", "f1", "--store", tmp_path, traps=[trap])

    assert ended.code == 1
    assert "trap at infra.training.policy_update:train_policy" in ended.err
    await _flow_run("f1-0000", StateType.FAILED)
    assert not (iteration_folder(tmp_path, run="f1") / "manifest.json").exists()
    listed = json.loads(program.run("runs", "--store", tmp_path, "--json").out)
    assert [(one["run"], one["iterations"], one["policies"]) for one in listed] == [("f1", 0, {})]


async def test_f2_a_flow_that_is_retried_repeats_no_rollout_and_no_optimiser_step(
    prefect_server, team, tmp_path, monkeypatch
):
    config = load_config(str(team / "run.yaml"))
    stepped: list[str] = []
    staged: list[int] = []
    failures = iter([RuntimeError("lost the connection")])

    def counted_step(*args, **kwargs):
        stepped.append(str(args[0]))
        return train(*args, **kwargs)

    def counted_group(*args):
        staged.append(args[3])
        return stage_group(*args)

    def commit_at_second_try(*args):
        for failure in failures:
            raise failure
        return commit(*args)

    train, commit = infra.training.policy_update.train_policy, tasks.commit_iteration.commit_manifest
    stage_group = tasks.roll_out.stage_group
    monkeypatch.setattr(infra.training.policy_update, "train_policy", counted_step)
    monkeypatch.setattr(tasks.roll_out, "stage_group", counted_group)
    monkeypatch.setattr(tasks.commit_iteration, "commit_manifest", commit_at_second_try)
    async with keep_open("f2", str(tmp_path), config, quiet=True):
        await iteration.with_options(retries=1)("f2", str(tmp_path))

    assert (await _flow_run("f2-0000", StateType.COMPLETED)).run_count == 2
    assert len(stepped) == 2, "one step a policy"
    assert sorted(staged) == [0, 1]
    assert [step["to_version"] for step in manifest_of(tmp_path, run="f2")["policies"].values()] == [1, 1]
    assert versions_of(tmp_path, "main", run="f2") == ["00000000", "00000001"]


async def test_f2_calling_the_flow_again_for_a_committed_iteration_is_refused_and_changes_nothing(
    prefect_server, trained
):
    before = (iteration_folder(trained, run="told") / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="iteration 0 of run 'told' was asked for, but the next one is 1"):
        await iteration("told", str(trained), 0)
    assert (iteration_folder(trained, run="told") / "manifest.json").read_bytes() == before
    assert not iteration_folder(trained, 1, run="told").exists()


# cases F3, I5
@pytest.mark.parametrize("agent", ["main", "searcher"])
def test_f3_every_rollout_of_a_query_is_an_execution_of_its_own_with_its_own_seeds(trained, agent):
    rows = rows_of(trained, f"trajectories/{agent}-0000", run="told")
    seeds = [turn["seed"] for row in rows for turn in row["turns"]]
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    assert len(set(seeds)) == len(seeds) > 8
    if agent == "main":
        places = [(row["query_id"], row["rollout_index"]) for row in rows]
        assert sorted(places) == sorted(
            (query, index) for query in {row["query_id"] for row in rows} for index in range(4)
        )


# case F7
async def test_f7_the_next_start_marks_a_killed_flow_run_as_crashed(prefect_server, program, team, tmp_path):
    train = ("train", team / "run.yaml", "--store", tmp_path, "--run", "killed")
    ended = program.run(*train, traps=[Trap("flows.compute_iteration:materialize_trajectories")])
    assert ended.code == -signal.SIGKILL
    assert (await _flow_run("killed-0000", StateType.RUNNING)).end_time is None
    assert program.run(*train).code == 0
    assert "Its process is gone; killed-0000" in (await _flow_run("killed-0000", StateType.CRASHED)).state.message
    await _flow_run("killed-0000", StateType.COMPLETED)


async def test_f9_a_flow_run_is_told_the_run_the_store_and_the_iteration_and_no_data(trained):
    run = await _flow_run("told-0000", StateType.COMPLETED)
    assert run.parameters == {"run": "told", "store": str(trained), "iteration": 0, "config": None}


# case F11: contention grows with the number of tasks, so that number must not grow with the rollouts
async def test_f11_an_iteration_is_one_task_a_stage_however_many_rollouts(trained):
    run = await _flow_run("told-0000", StateType.COMPLETED)
    assert await _task_states(run, STAGES) == [StateType.COMPLETED] * STAGES


async def test_f11_sixty_four_stages_at_once_all_reach_a_final_state(prefect_server):
    resources = SimpleNamespace(clock=StageClock())

    @stage
    async def sleeper(resources, number: int) -> int:
        await asyncio.sleep(0.05)
        return number

    @flow(name="mgrpo-sixty-four", flow_run_name="sixty-four")
    async def at_once() -> list[int]:
        return list(await asyncio.gather(*(sleeper(resources, number) for number in range(64))))

    assert await at_once() == list(range(64))
    run = await _flow_run("sixty-four", StateType.COMPLETED)
    assert await _task_states(run, 64) == [StateType.COMPLETED] * 64


# case F6: what is bound to a position is checked by its id
def test_f6_groups_staged_under_each_others_positions_are_not_believed(program, team, tmp_path):
    train = ("train", team / "run.yaml", "--run", "f6", "--store", tmp_path)
    program.run(*train, traps=[Trap("flows.compute_iteration:main_rollout", "exit")])
    staging = iteration_folder(tmp_path, run="f6") / "staging"
    (staging / "00000000.parquet").rename(staging / "kept")
    (staging / "00000001.parquet").rename(staging / "00000000.parquet")
    (staging / "kept").rename(staging / "00000001.parquet")
    ended = program.run(*train)

    assert ended.code == 0, ended.err
    asked = [row["query_id"] for row in rows_of(tmp_path, "queries", run="f6")]
    rolled = [row["query_id"] for row in rows_of(tmp_path, "trajectories/main-0000", run="f6")]
    assert rolled == [query for query in asked for _ in range(4)]
