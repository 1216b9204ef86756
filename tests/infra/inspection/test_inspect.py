"""`mgrpo inspect` on a real run whose questions try to steer the terminal."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from infra.inspection.queries import find_query
from infra.inspection.render import render_found
from infra.inspection.report import Asked, FoundRollout, inspect_iteration
from infra.inspection.token_colours import token_text
from infra.inspection.tree import TreeOptions, rollout_tree
from infra.store.runs import StoredRun, open_store, require_run
from infra.store.stored_iteration import open_stored
from infra.traces.rollout import AdvantageRow, RewardRow, TraceNode
from mgrpo_core.credit.leave_one_out import CreditChange
from mgrpo_core.errors import ConfigError, StoreError
from mgrpo_core.trajectories import Message, PathStep, Status, StopReason, Trajectory, TrajectoryKey, Turn
from tests.flows.stored import iteration_folder, rows_of
from tests.infra.conftest import HOSTILE

OURS = re.compile(r"\x1b\[[0-9;]*m")  # colours, which rich writes


@pytest.fixture(scope="session")
def run(trained) -> StoredRun:
    return require_run(open_store(str(trained)), "r")


def shown(found, *, width: int = 160, colours: bool = True, full: bool = False) -> str:
    """What a terminal gets."""
    console = Console(
        highlight=False, force_terminal=colours, width=width, color_system="truecolor" if colours else None
    )
    with console.capture() as captured:
        render_found(found, "a store", full=full, console=console)
    return captured.get()


def controls(text: str) -> set[str]:
    """Characters that could steer a terminal, but for colours of our own and line ends."""
    return {char for char in OURS.sub("", text) if not char.isprintable() and char != "\n"}


def test_queries_are_summed_up_from_the_tables(run, trained):
    found = inspect_iteration(run, 0, Asked())
    rewards = rows_of(trained, "rewards")
    included = [row for row in rows_of(trained, "advantages") if row["included"]]
    assert [one.position for one in found.lines] == [0, 1]
    for one in found.lines:
        own = [row for row in rewards if row["query_position"] == one.position]
        mains = [row for row in own if row["agent"] == "main"]
        assert (one.rollouts, one.invocations) == (len(mains), len(own) - len(mains))
        assert one.success == pytest.approx(np.mean([row["correct"] for row in mains]))
        assert one.reward == pytest.approx(np.mean([row["reward"] for row in mains]))
        assert set(one.signal) == {row["agent"] for row in included if row["query_id"] == one.query_id}
        assert one.matches == len(own)
    status = [row for agent in ("main", "searcher") for row in rows_of(trained, f"trajectories/{agent}-0000")]
    assert sum(one.policy_failed for one in found.lines) == sum(row["status"] == "policy_failed" for row in status)
    assert sum(one.infra_failed for one in found.lines) == 0


def test_filters_leave_the_queries_and_rollouts_that_match(run, trained):
    plus = {row["trajectory_id"] for row in rows_of(trained, "advantages") if row["advantage"] > 0}
    for agent in ("main", "searcher"):
        wanted = [row for row in rows_of(trained, "rewards") if row["trajectory_id"] in plus and row["agent"] == agent]
        found = inspect_iteration(run, 0, Asked(agent=agent, sign="+"))
        assert sum(one.matches for one in found.lines) == len(wanted)
        rollouts = inspect_iteration(run, 0, Asked(query="@1", agent=agent, sign="+"))
        assert [one.rollout for one in rollouts.lines] == sorted(
            {row["rollout_index"] for row in wanted if row["query_position"] == 1}
        )
    assert inspect_iteration(run, 0, Asked(text="nobody said this")).lines == ()
    assert "no trajectory matches" in shown(inspect_iteration(run, 0, Asked(text="nobody said this")))


def test_rollouts_of_a_query_stand_beside_each_other(run, trained):
    found = inspect_iteration(run, 0, Asked(query="@1"))
    mains = [row for row in rows_of(trained, "trajectories/main-0000") if row["query_position"] == 1]
    rewards = {row["trajectory_id"]: row["reward"] for row in rows_of(trained, "rewards")}
    assert [one.reply for one in found.lines] == [row["reply"] for row in mains]
    assert [one.reward for one in found.lines] == [rewards[row["trajectory_id"]] for row in mains]
    calls = [row for row in rows_of(trained, "trajectories/searcher-0000") if row["query_position"] == 1]
    assert sum(part.count for one in found.lines for part in one.calls) == len(calls)


def rollout_with_a_call(run: StoredRun, trained, **asked) -> FoundRollout:
    row = next(row for row in rows_of(trained, "trajectories/searcher-0000") if row["query_position"] == 1)
    return inspect_iteration(run, 0, Asked(query="@1", rollout=row["rollout_index"], **asked))


def test_a_rollout_is_a_tree_of_turns_with_rewards_and_credit(run, trained):
    found = rollout_with_a_call(run, trained)
    (root,) = found.nodes
    text = shown(found, colours=False)
    assert text.index("main  reward") < text.index("  delegate searcher  ") < text.index("searcher 0  reward")
    assert text.index("searcher 0  reward") < text.index("without it: mean |ΔA|") < text.index("from searcher")
    assert f"id {root.children[0].trajectory.trajectory_id[:8]}" in text
    assert f"0.5 x format {root.children[0].reward.format:g}" in text
    assert "Say the colour." not in text
    assert "Say the colour." in shown(found, colours=False, full=True)


def test_one_trajectory_is_found_by_its_path(run, trained):
    (node,) = rollout_with_a_call(run, trained, agent="main/0:searcher").nodes
    assert node.trajectory.key.agent_path == "main/0:searcher"
    assert rollout_with_a_call(run, trained, agent="main/9:searcher").nodes == ()


def test_tokens_are_marked_where_they_were_sampled(run, trained):
    found = rollout_with_a_call(run, trained, tokens=True)
    one = found.nodes[0].trajectory
    marked = re.findall(r"‹(.*?) (-?\d+\.\d\d)›", shown(found, colours=False, width=100_000), flags=re.DOTALL)
    below = [child.trajectory for child in found.nodes[0].children]
    logprobs = [logprob for part in (one, *below) for logprob in part.logprobs[part.loss_mask].tolist()]
    assert [float(number) for _, number in marked] == pytest.approx(logprobs, abs=0.006)  # two digits
    told = found.to_json()["trajectories"][0]["tokens"]
    assert [token["sampled"] for token in told] == one.loss_mask.tolist()
    assert [token["logprob"] is None for token in told] == (~one.loss_mask).tolist()
    assert "".join(token["text"] for token in told).count("assistant") >= len(one.turns)


@pytest.mark.parametrize("asked", [Asked(), Asked("@1"), Asked("@1", 0), Asked("@1", 0, tokens=True)], ids=str)
@pytest.mark.parametrize("colours", [True, False])
def test_what_a_question_says_steers_nothing(run, asked, colours):
    text = shown(inspect_iteration(run, 0, asked), colours=colours, full=True)
    assert controls(text) == set()
    plain = OURS.sub("", text)
    assert "\\x1b[2J" in plain
    assert "[bold red]<scr" in plain  # in tables a question is cut
    assert asked.query is None or "<script>alert(1)</script>[/]\\u202e\\x9b31m" in plain
    assert colours or "\x1b" not in text


def hostile_node() -> TraceNode:
    """Everything that a policy, a tool or an error may write."""
    key = TrajectoryKey("r", 0, f"q{HOSTILE}", 0, (PathStep("main", 0), PathStep(f"sub{HOSTILE}", 0)))
    turn = Turn(1, 2, "stop", 0, 1, "tool", f"name{HOSTILE}", f"{{{HOSTILE}", f"error{HOSTILE}", 3, 4000, True)
    nothing = np.zeros(0)
    one = Trajectory(
        key, "p", nothing, nothing, nothing, (0,), (turn,),
        (Message("user", "task"), Message("assistant", f"wrote{HOSTILE}\rgone"),
         Message("tool", f"saw{HOSTILE}\x08", f"n{HOSTILE}"), Message("user", f"more{HOSTILE}")),
        f"task{HOSTILE}", f"reply{HOSTILE}", 1.0, Status.INFRA_FAILED, StopReason.INFRASTRUCTURE, f"failure{HOSTILE}",
    )  # fmt: skip
    reward = RewardRow(
        "failed", f"reason{HOSTILE}", None, None, None, None, None, 1.0, None, None, None, f"v{HOSTILE}", f"j{HOSTILE}"
    )
    return TraceNode(one, reward, AdvantageRow(0.0, 0.0, None, None, 0, False, f"excluded{HOSTILE}"), ())


def test_nothing_that_an_agent_a_tool_or_an_error_says_steers_anything():
    console = Console(highlight=False, force_terminal=True, width=200, color_system="truecolor")
    with console.capture() as captured:
        console.print(rollout_tree(hostile_node(), TreeOptions(full=True)))
    text = captured.get()
    assert controls(text) == set()
    flat = OURS.sub("", text)
    for word in ("sub", "name", "error", "wrote", "saw", "n", "more", "task", "failure", "reason", "excluded"):
        assert f"{word}\\x1b[2J" in flat, word
    assert "\\rgone" in flat
    assert "\\x08" in flat


def test_nothing_that_a_token_says_steers_anything():
    stream = np.arange(2, dtype=np.int32), np.array([False, True]), np.array([np.nan, -1.0], dtype=np.float32)
    one = replace(hostile_node().trajectory, token_ids=stream[0], loss_mask=stream[1], logprobs=stream[2])
    for coloured in (True, False):
        text = token_text(one, [HOSTILE, f"[red]{HOSTILE}"], full=True, coloured=coloured)
        assert controls(text.plain) == set()
        assert "[red]" in text.plain
    assert "<0>" in token_text(one, None, full=True, coloured=True).plain


def test_long_texts_are_cut_with_a_note_and_whole_on_request():
    node = hostile_node()
    long = replace(node.trajectory, messages=(Message("user", "?"), Message("tool", "line\n" * 1000, "search")))
    for full in (False, True):
        console = Console(width=100)
        with console.capture() as captured:
            console.print(rollout_tree(replace(node, trajectory=long), TreeOptions(full=full)))
        assert ("more characters: --full" in captured.get()) != full
        assert captured.get().count("line") == (1000 if full else 6)


def test_a_trajectory_without_rows_says_so():
    node = replace(hostile_node(), reward=None, advantage=None)
    change = CreditChange(others=3, mean_change=0.5, sign_changes=1, lost=2)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(rollout_tree(node, TreeOptions(without={node.trajectory.trajectory_id: change})))
    assert "no reward row  no advantage row" in captured.get()
    assert "mean |ΔA| 0.500 of 3 others, 1 would change sign, 2 would leave the loss" in captured.get()


def test_a_query_is_named_by_id_or_by_place(run):
    stored = open_stored(run, 0)
    ids = [query.query_id for query in stored.queries()]
    assert [find_query(stored, one)[0] for one in (ids[1], "@1", "1", "@0")] == [1, 1, 1, 0]
    for wrong in ("@2", "-1", "nothing", "@", ""):
        with pytest.raises(ConfigError, match=r"It has @0 'q"):
            find_query(stored, wrong)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked("@1", 99), "Rollouts there: 0, 1, 2, 3"),
        (Asked(rollout=0), "of which query"),
        (Asked("@1", tokens=True), "of which rollout"),
        (Asked(agent="bob"), "There are main, searcher"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(run, asked, words):
    with pytest.raises((ConfigError, StoreError), match=words):
        inspect_iteration(run, 0, asked)


def test_the_command_prints_for_people_and_for_programs(program, trained):
    for words in ([], ["@1"], ["@1", "--rollout", 0], ["@1", "--rollout", 0, "--tokens"]):
        ended = program.run("inspect", "r", 0, *words, "--store", trained)
        assert (ended.code, controls(ended.out)) == (0, set()), ended.err
        ended = program.run("inspect", "r", 0, *words, "--store", trained, "--json")
        assert (ended.code, controls(ended.out)) == (0, set()), ended.err
        assert HOSTILE in _texts(json.loads(ended.out)), "escaped, not changed"


def _texts(value) -> str:
    if isinstance(value, dict):
        return "".join(map(_texts, value.values()))
    if isinstance(value, list):
        return "".join(map(_texts, value))
    return str(value)


def test_the_command_ends_with_2_for_what_is_not_there_and_1_for_damage(program, trained, tmp_path):
    import shutil

    for words in (["r", 7], ["r", 0, "@9"], ["r", 0, "@1", "--rollout", 9], ["nobody", 0]):
        ended = program.run("inspect", *words, "--store", trained)
        assert (ended.code, controls(ended.err)) == (2, set())
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = iteration_folder(tmp_path) / "rewards.parquet"
    path.write_bytes(path.read_bytes()[:100])
    ended = program.run("inspect", "r", 0, "--store", tmp_path)
    assert (ended.code, "rewards.parquet: not a whole" in ended.err) == (1, True)
