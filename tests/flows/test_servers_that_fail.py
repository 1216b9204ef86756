"""Iterations on servers that die, return, and talk nonsense: played ones with a model behind them, over HTTP."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.program import Program
from tests.flows.small_team import save_config
from tests.flows.stored import iteration_folder, metrics_of, rows_of, versions_of
from tests.flows.two_families import (
    check_that_each_kept_to_its_own_family,
    config_of_two_families,
    save_two_families,
)
from tests.infra.serving.vllm.model_server import ModelServer
from tests.infra.serving.vllm.played_server import GENERATE, HANG_UP

CONTEXT = 384
Servers = dict[str, ModelServer]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_families(tmp_path_factory.mktemp("families"))


@pytest.fixture
def servers(families: Path) -> Iterator[Servers]:
    made = {name: ModelServer(families / name, name, CONTEXT) for name in ("main", "sub")}
    yield made
    for one in made.values():
        one.stop()


def config_with(families: Path, servers: Servers, *, sub_deadline_s: float = 120.0, **rollout: Any) -> dict[str, Any]:
    config = config_of_two_families(families)
    for name, server in servers.items():
        config["policies"][name]["servers"] = [server.url]
    config["policies"]["sub"]["serving"] = {"deadline_s": sub_deadline_s, "connect_timeout_s": 0.5}
    config["rollout"] |= {"concurrency": 1, **rollout}  # rollout by rollout: what is lost follows from the seed
    return config


def is_turn(route: str, answer: Any) -> bool:
    """Whether this is an agent's turn, and not a probe, which is of one token."""
    return route == GENERATE and len(answer["choices"][0]["token_ids"]) > 1


def dies_at_turn(server: ModelServer, number: int, then: Callable[[], None] = lambda: None) -> None:
    """Have the server die in the middle of its turn `number`, from 1."""
    turns: list[None] = []

    def spoil(route: str, answer: Any) -> Any:
        if is_turn(route, answer):
            turns.append(None)
            if len(turns) == number:
                server.stop()
                then()
                return HANG_UP
        return answer

    server.spoil = spoil


def train(program: Program, config: dict[str, Any], folder: Path):
    return program.run("train", save_config(folder / "run.yaml", config), "--run", "r", "--store", folder / "store")


def test_a_server_that_dies_in_mid_rollout_and_returns_in_time_costs_no_trajectory(
    program: Program, families: Path, servers: Servers, tmp_path: Path
) -> None:
    sub = servers["sub"]
    dies_at_turn(sub, 3, lambda: threading.Timer(1.0, sub.restart).start())
    ended = train(program, config_with(families, servers, concurrency=8), tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    check_that_each_kept_to_its_own_family(store)
    metrics = metrics_of(store)
    assert (metrics["main/infra_failed"], metrics["searcher/infra_failed"]) == (0, 0)
    assert metrics["main/trajectories"] == 8
    assert sub.count("/collective_rpc") == 3  # version 0, once more after its restart, and version 1
    assert sub.label.startswith("sub/1/")


def test_what_a_dead_server_takes_along_is_left_out_and_counted_and_the_iteration_finishes(
    program: Program, families: Path, servers: Servers, tmp_path: Path
) -> None:
    sub, died, back = servers["sub"], threading.Event(), threading.Event()

    def return_later() -> None:
        died.set()
        threading.Timer(2.0, lambda: (sub.restart(), back.set())).start()

    def wait_for_sub(route: str, answer: Any) -> Any:
        if died.is_set() and is_turn(route, answer):
            back.wait(60)
        return answer

    dies_at_turn(sub, 2, return_later)
    servers["main"].spoil = wait_for_sub
    ended = train(program, config_with(families, servers, sub_deadline_s=0.6), tmp_path)

    assert ended.code == 0, ended.err
    store = tmp_path / "store"
    for agent in ("main", "searcher"):
        (lost,) = [row for row in rows_of(store, f"trajectories/{agent}-0000") if row["status"] == "infra_failed"]
        assert f"no server of policy 'sub' ({sub.url}) has answered for" in lost["failure"]
        (reward,) = [row for row in rows_of(store, "rewards") if row["trajectory_id"] == lost["trajectory_id"]]
        assert reward["reward"] is None
        (credit,) = [row for row in rows_of(store, "advantages") if row["trajectory_id"] == lost["trajectory_id"]]
        assert not credit["included"]
        assert metrics_of(store)[f"{agent}/infra_failed"] == 1
    assert "! main: 1 trajectories lost to infrastructure" in ended.out + ended.err
    assert versions_of(store, "sub") == ["00000000", "00000001"]


def test_a_server_that_is_gone_for_good_stops_the_iteration_in_its_deadline_and_by_its_name(
    program: Program, families: Path, servers: Servers, tmp_path: Path
) -> None:
    sub, died = servers["sub"], []
    dies_at_turn(sub, 1, lambda: died.append(time.monotonic()))
    ended = train(program, config_with(families, servers, sub_deadline_s=6.0, min_scored_share=0.9), tmp_path)
    seconds = time.monotonic() - died[0]

    assert ended.code == 1
    assert "IncompleteIterationError: r-0000: " in ended.err
    assert f"no server of policy 'sub' ({sub.url}) has answered for" in ended.err
    assert "(serving.deadline_s 6)" in ended.err
    failed = ended.err.split("of 8 rollouts")[0].rsplit(" ", 2)[-2]
    assert int(failed) >= 3
    assert seconds < 6.0 * int(failed)  # waited for once, not by each
    assert not (iteration_folder(tmp_path / "store") / "manifest.json").exists()


def test_answers_that_make_no_sense_lose_their_trajectories_and_are_no_reward_of_0(
    program: Program, families: Path, servers: Servers, tmp_path: Path
) -> None:
    # cases I3 and I4
    main = servers["main"]

    def without(*logprobs: float | None) -> Callable[[Any], Any]:
        def changed(answer: Any) -> Any:
            choice = answer["choices"][0]
            content = [
                {**one, "logprob": value} for one, value in zip(choice["logprobs"]["content"], logprobs, strict=False)
            ]
            return {"choices": [choice | {"logprobs": {"content": content}}]}

        return changed

    bad: list[tuple[Callable[[Any], Any], str]] = [
        (lambda _: 400, "status 400"),
        (lambda answer: {"choices": [answer["choices"][0] | {"logprobs": None}]}, "no log-probs in the answer"),
        (without(-0.5), "2 token ids and 1 log-probs"),
        (without(None, float("nan")), "none of the 2 log-probs is a number"),
        (without(-0.75, None), ""),  # one is missing: kept, without a correction, and counted
    ]
    left = list(bad)
    main.spoil = lambda route, answer: left.pop(0)[0](answer) if left and is_turn(route, answer) else answer
    ended = train(program, config_with(families, servers), tmp_path)

    assert ended.code == 0, ended.err
    assert not left
    store = tmp_path / "store"
    lost = [row for row in rows_of(store, "trajectories/main-0000") if row["status"] == "infra_failed"]
    rewards = {row["trajectory_id"]: row["reward"] for row in rows_of(store, "rewards")}
    # requests of rollouts side by side arrive in any order
    for _, said in bad[:4]:
        assert sum(said in row["failure"] for row in lost) == 1, said
    for row in lost:
        assert f"{main.url}" in row["failure"]
        assert rewards[row["trajectory_id"]] is None
    metrics = metrics_of(store)
    assert metrics["main/infra_failed"] == 4
    assert metrics["update/main/missing_sampler_tokens"] == 1
