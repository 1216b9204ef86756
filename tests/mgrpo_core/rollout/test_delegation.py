import asyncio

import pytest

from mgrpo_core.errors import ConfigError, InfrastructureError, PolicyServerError
from mgrpo_core.rollout.agents import AgentSpec, Limits, Team
from mgrpo_core.rollout.counts import count_trajectories, duplicate_share
from mgrpo_core.rollout.delegation import DelegationBoard
from mgrpo_core.rollout.ledger import RolloutLedger
from mgrpo_core.seeds import seed_of
from mgrpo_core.trajectories import PathStep, Query, Status, StopReason, TrajectoryKey


def paths(rollout):
    return [trajectory.key.agent_path for trajectory in rollout.trajectories]


async def nothing_left():
    await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_main_agent_gets_the_sub_agents_own_answer_and_nothing_else(play, say, search):
    play.policy("m", say.in_turn(say.call("searcher", task="Capital of Peru?"), say.answer("Lima")))
    play.policy("s", say.in_turn(say.call("search", query="Peru"), f"<think>secret</think>{say.answer('It is Lima.')}"))
    (rollout,) = await play.rollouts(say.team(search))
    main, sub = rollout.trajectories
    assert paths(rollout) == ["main", "main/0:searcher"]
    assert main.messages[3].content == "It is Lima."
    assert main.messages[3].name == "searcher"
    assert (sub.task, sub.reply, sub.policy) == ("Capital of Peru?", "It is Lima.", "s")
    assert sub.parent_id == main.trajectory_id
    assert "secret" not in play.tokenizer.decode(main.token_ids)
    # case B18: the report is context for main, and trained in the sub-agent's own row only
    assert "It is Lima." not in play.tokenizer.decode(main.token_ids[main.loss_mask])
    assert "It is Lima." in play.tokenizer.decode(sub.token_ids[sub.loss_mask])


async def test_context_is_handed_over_below_the_task(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="Do it.", context="Peru"), say.answer("x")))
    play.policy("s", say.in_turn(say.answer("done")))
    (rollout,) = await play.rollouts(say.team())
    assert rollout.trajectories[1].task == "Do it.\n\nPeru"


async def test_a_sub_agent_without_an_answer_is_said_to_have_none(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", lambda request: "oops")
    (rollout,) = await play.rollouts(say.team(sub_limits=Limits(max_turns=2)))
    main, sub = rollout.trajectories
    assert main.messages[3].content == "searcher ended without an answer (turn_limit)."
    assert (sub.status, sub.stop_reason) == (Status.POLICY_FAILED, StopReason.TURN_LIMIT)
    assert main.status is Status.OK


async def test_an_answer_longer_than_the_parent_reads_is_cut(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y" * 500)))
    (rollout,) = await play.rollouts(say.team(main_limits=Limits(max_observation_tokens=100)))
    turn = rollout.trajectories[0].turns[0]
    assert (turn.observation_cut, turn.observation_tokens, turn.observation_chars) == (True, 100, 500)
    assert rollout.trajectories[1].reply == "y" * 500


async def test_a_dead_sub_agent_server_fails_its_parent_and_no_sibling(play, say):
    # case D6: of four rollouts one loses its sub-agent's server
    def sub(request):
        return PolicyServerError("server down") if "q2" in request.prompt else say.answer("ok")

    play.policy(
        "m",
        lambda r: (
            say.call("searcher", task="q2" if "Question 2" in r.prompt else "t") if not r.turn else say.answer("x")
        ),
    )
    play.policy("s", sub)
    rollouts = await play.rollouts(say.team(), queries=4)
    statuses = [[trajectory.status for trajectory in rollout.trajectories] for rollout in rollouts]
    assert statuses == [
        [Status.OK] * 2,
        [Status.OK] * 2,
        [Status.INFRA_FAILED] * 2,
        [Status.OK] * 2,
    ]
    main, sub = rollouts[2].trajectories
    assert sub.failure == "policy s: server down"
    assert main.failure == "main/0:searcher: policy s: server down"
    assert main.turns[0].action == "delegate"  # what it had sampled is kept
    # case D5: everything is accounted for
    counts = count_trajectories(one for rollout in rollouts for one in rollout.trajectories)
    assert (counts.ok, counts.policy_failed, counts.infra_failed, counts.trajectories) == (6, 0, 2, 8)


async def test_no_sub_agent_call_anywhere_is_a_rollout_of_one(play, say):
    # case D1
    play.policy("m", say.in_turn(say.answer("Lima")))
    play.policy("s", lambda request: pytest.fail("asked"))
    rollouts = await play.rollouts(say.team(), queries=2, k=2)
    assert [paths(rollout) for rollout in rollouts] == [["main"]] * 4


def chain(*names: str, **bounds: int) -> Team:
    """Each may delegate to every one of them, itself included."""
    specs = {name: AgentSpec(name, "s" if name != "main" else "m", "Go.", delegates=names[1:]) for name in names}
    return Team("main", specs, **bounds)


async def test_a_sub_agent_that_always_calls_itself_is_stopped_by_depth(play, say):
    # case D11: depth 1; the second level is refused with a tool error, the child finishes alone
    play.policy("m", say.in_turn(say.call("sub", task="t"), say.answer("x")))
    play.policy("s", say.in_turn(say.call("sub", task="deeper"), say.answer("alone")))
    (rollout,) = await play.rollouts(chain("main", "sub", max_depth=1))
    assert paths(rollout) == ["main", "main/0:sub"]
    sub = rollout.trajectories[1]
    assert (sub.reply, sub.key.depth) == ("alone", 1)
    assert sub.turns[0].error == "refused: no delegation below level 1"
    assert sub.messages[3].content.startswith("Refused: no delegation below level 1")


async def test_the_number_of_delegations_is_bounded_whatever_the_depth(play, say):
    # case D11: everybody delegates three times; depth would allow 3 + 9 + 27
    play.policy("m", say.in_turn(*[say.call("sub", task="t")] * 3, say.answer("x")))
    play.policy("s", say.in_turn(*[say.call("sub", task="t")] * 3, say.answer("y")))
    (rollout,) = await play.rollouts(chain("main", "sub", max_depth=3, max_rollout_delegations=5))
    assert len(rollout.trajectories) == 1 + 5
    assert all(one.status is Status.OK for one in rollout.trajectories)
    (free,) = await play.rollouts(chain("main", "sub", max_depth=3), iteration=1)
    assert len(free.trajectories) == 1 + 3 + 9 + 27


async def test_a_trajectorys_own_delegations_are_bounded_and_the_refused_leave_no_row(play, say):
    play.policy("m", say.in_turn(*[say.call("searcher", task="t")] * 3, say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")))
    (rollout,) = await play.rollouts(say.team(main_limits=Limits(max_delegations=2)))
    assert paths(rollout) == ["main", "main/0:searcher", "main/1:searcher"]
    assert rollout.trajectories[0].turns[2].error == "refused: the limit of 2 delegations is reached"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [1, 2])
async def test_no_chain_of_delegations_waits_for_itself(play, say, limit):
    # A calls B, B calls A, three levels deep, many at once, with one place each
    def script(request):
        if request.turn:
            return say.answer("up")
        return say.call("b" if "to b" in request.prompt else "a", task="to a" if "to b" in request.prompt else "to b")

    play.policy("m", say.in_turn(say.call("a", task="to b"), say.answer("x")), delay_s=0.001)
    play.policy("s", script, delay_s=0.001)
    rollouts = await play.rollouts(chain("main", "a", "b", max_depth=3), queries=6, limits={"a": limit, "b": limit})
    assert [paths(one) for one in rollouts] == [["main", "main/0:a", "main/0:a/0:b", "main/0:a/0:b/0:a"]] * 6
    assert all(one.status is Status.OK for rollout in rollouts for one in rollout.trajectories)
    assert 1 <= play.clients["s"].most_at_work <= 2 * limit  # two stages
    assert await nothing_left()


async def test_a_stage_works_at_no_more_than_its_limit(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")), delay_s=0.002)
    await play.rollouts(say.team(), queries=12, limits={"searcher": 3})
    assert play.clients["s"].most_at_work == 3


async def test_no_more_rollouts_than_allowed_are_in_flight(play, say):
    play.policy("m", say.in_turn("oops", say.answer("x")), delay_s=0.002)
    await play.rollouts(say.alone(), queries=5, k=2, concurrency=4)
    assert play.clients["m"].most_at_work == 4


async def test_trajectories_are_ordered_by_path_not_by_arrival_nor_as_text(play, say):
    # eleven calls: as text, main/10 would come before main/2
    play.policy("m", say.in_turn(*[say.call("searcher", task="t")] * 11, say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")))
    (rollout,) = await play.rollouts(say.team())
    assert paths(rollout) == ["main", *(f"main/{index}:searcher" for index in range(11))]


async def test_the_same_run_gives_the_same_rollouts_whatever_the_concurrency(play, say, search):
    def sub(request):
        return say.call("search", query=f"{request.sampling.seed % 97}") if not request.turn else say.answer("y")

    seen = []
    for limits in ({"searcher": 1}, {"searcher": 8}):
        play.policy("m", say.in_turn(*[say.call("searcher", task="t")] * 2, say.answer("x")))
        play.policy("s", sub)
        rollouts = await play.rollouts(say.team(search), queries=3, k=3, limits=limits, concurrency=limits["searcher"])
        rows = [one for rollout in rollouts for one in rollout.trajectories]
        seen.append([(one.trajectory_id, one.token_ids.tobytes(), one.logprobs.tobytes()) for one in rows])
    assert seen[0] == seen[1]
    assert len({row[0] for row in seen[0]}) == 27


async def test_every_trajectory_is_reported_as_it_ends(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")))
    ended = []
    rollouts = await play.rollouts(say.team(), k=2, on_trajectory=ended.append)
    assert sorted(one.key.agent_path for one in ended) == ["main", "main", "main/0:searcher", "main/0:searcher"]
    tokens = sum(one.sampled_tokens for one in ended)
    assert tokens == count_trajectories(one for rollout in rollouts for one in rollout.trajectories).sampled_tokens


async def test_groups_are_handed_over_as_they_become_whole(play, say):
    gate = asyncio.Event()
    handed = []

    async def keep(query, group):
        handed.append(query.query_id)
        gate.set()

    play.policy("m", say.in_turn(say.answer("x")))
    slow = play.clients["m"].generate

    async def generate(prompt_ids, sampling, *, trajectory_id):
        if "slow" in play.tokenizer.decode(prompt_ids):
            await gate.wait()  # ends only once another group was handed over
        return await slow(prompt_ids, sampling, trajectory_id=trajectory_id)

    play.clients["m"].generate = generate
    await play.stages(say.alone(), 2).run([Query("a", "slow", ()), Query("b", "fast", ())], keep)
    assert handed == ["b", "a"]


async def test_two_stages_side_by_side_end_together(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")))
    stages = play.stages(say.team())

    async def keep(query, group):
        pass

    serving = asyncio.create_task(stages.serve("searcher", 1))
    await stages.run_main([Query("q", "?", ())], keep)
    await asyncio.wait_for(serving, 1)


async def test_a_group_that_cannot_be_kept_ends_both_stages_with_its_error(play, say):
    async def keep(query, group):
        raise OSError("disk full")

    play.policy("m", say.in_turn(say.answer("x")))
    play.policy("s", say.in_turn(say.answer("y")))
    with pytest.raises(OSError, match="disk full"):
        await play.stages(say.team()).run([Query("q", "?", ())], keep)
    assert await nothing_left()


async def test_a_reply_that_is_late_names_who_waits_for_what_and_keeps_the_sub_agents_tokens(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t"), say.answer("x")))
    play.policy("s", say.in_turn("oops", say.answer("y")))
    quick = play.clients["s"].generate

    async def generate(prompt_ids, sampling, *, trajectory_id):
        if len(play.clients["s"].requests) == 1:
            await asyncio.sleep(30)
        return await quick(prompt_ids, sampling, trajectory_id=trajectory_id)

    play.clients["s"].generate = generate
    (rollout,) = await play.rollouts(say.team(), reply_deadline_s=0.05)
    main, sub = rollout.trajectories
    assert (main.status, sub.status) == (Status.INFRA_FAILED, Status.INFRA_FAILED)
    assert sub.failure.startswith("no reply within 0.05 s: it is at work; look at its policy's server")
    assert main.failure == f"main/0:searcher: {sub.failure}"
    assert sub.sampled_tokens == 5
    assert await nothing_left()


async def test_a_reply_that_no_stage_would_give_says_so(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t")))
    play.policy("s", say.in_turn(say.answer("y")))
    stages = play.stages(say.team(), reply_deadline_s=0.05)
    groups = []

    async def keep(query, group):
        groups.extend(group)

    await stages.run_main([Query("q", "?", ())], keep)
    (main,) = groups[0].trajectories
    assert "main/0:searcher: no reply within 0.05 s: no stage serves 'searcher'" in main.failure


async def test_a_queue_that_is_too_long_says_so(play, say):
    play.policy("m", say.in_turn(say.call("searcher", task="t")))
    play.policy("s", say.in_turn(say.answer("y")))

    async def generate(prompt_ids, sampling, *, trajectory_id):
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(1)  # slow to stop: its place is free only when the other one is overdue, too

    play.clients["s"].generate = generate
    rollouts = await play.rollouts(say.team(), queries=2, limits={"searcher": 1}, reply_deadline_s=0.1)
    failures = [rollout.trajectories[0].failure for rollout in rollouts]
    assert "it is at work" in failures[0]
    assert "still queued behind the limit of 'searcher'" in failures[1]
    assert len(rollouts[1].trajectories) == 1  # never started: no row of it


async def test_the_deepest_of_a_chain_is_named_and_stopped_with_it(play, say):
    play.policy("m", say.in_turn(say.call("a", task="go")))
    play.policy("s", lambda r: say.call("b", task="deep"), delay_s=0)
    quick = play.clients["s"].generate

    async def generate(prompt_ids, sampling, *, trajectory_id):
        if "deep" in play.tokenizer.decode(prompt_ids):
            await asyncio.sleep(30)
        return await quick(prompt_ids, sampling, trajectory_id=trajectory_id)

    play.clients["s"].generate = generate
    (rollout,) = await play.rollouts(chain("main", "a", "b"), reply_deadline_s=0.05)
    assert paths(rollout) == ["main", "main/0:a", "main/0:a/0:b"]
    main, first, second = rollout.trajectories
    assert "it waits for main/0:a/0:b itself" in first.failure
    assert second.failure == "stopped, because nobody waits for its reply any more"
    assert "main/0:a: no reply within 0.05 s" in main.failure
    assert await nothing_left()


async def test_a_stage_that_breaks_fails_who_waits_for_it_at_once_and_raises(play, say):
    board = DelegationBoard(["sub"], deadline_s=30)
    ledger = RolloutLedger("q", 0, 10)
    key = TrajectoryKey("r", 0, "q", 0, (PathStep("main", 0), PathStep("sub", 0)))

    async def broken(invocation):
        raise TypeError("a bug")

    serving = asyncio.create_task(board.serve("sub", 1, broken))
    asked = [asyncio.create_task(board.ask(key, "t", ledger=ledger)) for _ in range(3)]
    with pytest.raises(TypeError, match="a bug"):
        await serving
    for one in asked:
        with pytest.raises(InfrastructureError, match=r"main/0:sub: its stage"):
            await one
    with pytest.raises(InfrastructureError, match="its stage ended in an error"):
        await board.ask(key, "t", ledger=ledger)
    assert await nothing_left()


async def test_a_stage_that_is_cancelled_leaves_nobody_waiting_in_its_queue():
    board = DelegationBoard(["sub"], deadline_s=30)
    key = TrajectoryKey("r", 0, "q", 0, (PathStep("main", 0), PathStep("sub", 0)))
    serving = asyncio.create_task(board.serve("sub", 1, None))
    await asyncio.sleep(0)
    asked = asyncio.create_task(board.ask(key, "t", ledger=RolloutLedger("q", 0, 10)))
    serving.cancel()  # before the stage has taken up what was just posted
    with pytest.raises(asyncio.CancelledError):
        await serving
    with pytest.raises(InfrastructureError, match="main/0:sub: its stage has ended"):
        await asyncio.wait_for(asked, 1)


async def test_cancelling_all_stages_leaves_nothing_pending(play, say):
    play.policy("m", say.in_turn(say.call("a", task="go")))
    play.policy("s", lambda r: say.call("b", task="deep") if "go" in r.prompt else "oops", delay_s=0.02)
    running = asyncio.create_task(play.rollouts(chain("main", "a", "b"), queries=5, limits={"a": 2, "b": 1}))
    await asyncio.sleep(0.07)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await nothing_left()


async def test_a_closed_board_and_a_stranger_are_refused():
    board = DelegationBoard(["sub"], deadline_s=1)
    ledger = RolloutLedger("q", 0, 10)
    key = TrajectoryKey("r", 0, "q", 0, (PathStep("main", 0), PathStep("sub", 0)))
    board.close()
    with pytest.raises(InfrastructureError, match="the board is closed"):
        await board.ask(key, "t", ledger=ledger)
    with pytest.raises(ConfigError, match=r"'other' cannot be asked. On the board: sub"):
        await board.serve("other", 1, None)
    with pytest.raises(ConfigError, match="expected at least 1"):
        await board.serve("sub", 0, None)


def test_counts_of_nothing_are_zero_and_its_shares_defined():
    counts = count_trajectories([])
    assert (counts.trajectories, counts.refused_share, duplicate_share([])) == (0, 0.0, 0.0)


async def test_refused_calls_and_malformed_turns_are_counted_apart(play, say, search):
    # case D10: two calls, of which one by an unknown name; one turn of plain text; one answer
    play.policy(
        "m", say.in_turn(say.call("serach", query="x"), say.call("search", query="x"), "plain", say.answer("Lima"))
    )
    counts = count_trajectories([await play.main(say.alone(search))])
    assert (counts.turns, counts.malformed_turns, counts.calls, counts.refused_calls) == (4, 2, 2, 1)
    assert counts.refused_share == 0.5


async def test_clones_in_a_group_are_noticed(play, say):
    # case I5: three of four equal -> 2 of 4 repeat an earlier one
    one = seed_of(7, 0, "q0", 2, "main", 0)
    play.policy("m", lambda r: say.answer("b" if r.sampling.seed == one else "a"))
    assert duplicate_share(await play.rollouts(say.alone(), k=4)) == 0.5
