import asyncio

import numpy as np
import pytest

from mgrpo_core.errors import ConfigError, PolicyServerError, TemplateError, ToolError, ToolOutageError
from mgrpo_core.rollout.agents import Limits
from mgrpo_core.rollout.deadlines import Deadlines
from mgrpo_core.rollout.protocols import Generation, PolicyClient, Tool
from mgrpo_core.rollout.scripted import ScriptedTool
from mgrpo_core.seeds import seed_of
from mgrpo_core.trajectories import Status, StopReason


def test_the_scripted_fakes_are_what_they_stand_for(play, search):
    play.policy("m", lambda request: "hi")
    assert isinstance(play.clients["m"], PolicyClient)
    assert isinstance(search, Tool)


async def test_an_answer_ends_the_trajectory(play, say):
    play.policy("m", say.in_turn(say.answer(" Lima ")))
    main = await play.main(say.alone())
    assert (main.status, main.stop_reason, main.reply) == (Status.OK, StopReason.ANSWER, "Lima")
    assert main.task == "Question 0?"
    assert [message.role for message in main.messages] == ["system", "user", "assistant"]
    (turn,) = main.turns
    assert turn.action == "answer"
    assert main.loss_mask.nonzero()[0].tolist() == list(range(turn.start, turn.stop))


async def test_a_tool_is_called_with_what_the_policy_wrote(play, say):
    seen = []
    tool = ScriptedTool("search", lambda arguments: seen.append(dict(arguments)) or "Lima")
    written = '{"name":"search" , "arguments": {"query":  "Peru"}}'
    play.policy("m", say.in_turn(f"<tool_call>{written}</tool_call>", say.answer("Lima")))
    main = await play.main(say.alone(tool))
    assert seen == [{"query": "Peru"}]
    turn = main.turns[0]
    assert (turn.action, turn.action_name, turn.arguments_json) == ("tool", "search", '{"query":  "Peru"}')
    assert (turn.observation_tokens, turn.observation_chars, turn.observation_cut) == (4, 4, False)
    assert main.messages[3].content == "Lima"


async def test_tool_text_is_never_trained(play, say):
    # case B18: sampled tokens of two turns, and between them the tool's
    tool = ScriptedTool("search", lambda arguments: "a very long result " * 20)
    first, second = say.call("search", query="Peru"), say.answer("Lima")
    play.policy("m", say.in_turn(first, second))
    main = await play.main(say.alone(tool))
    sampled = play.tokenizer.decode(main.token_ids[main.loss_mask])
    assert sampled == f"{first}<|im_end|>{second}<|im_end|>"


async def test_sampled_tokens_are_a_sum_of_the_mask_not_a_span(play, say):
    # case B11: turns of 4 + 1 and 5 + 1 tokens with a reply between them
    play.policy("m", say.in_turn("oops", "ouch!"))
    main = await play.main(say.alone(limits=Limits(max_turns=2)))
    assert main.sampled_tokens == 11
    assert main.turns[-1].stop - main.turns[0].start > 11


@pytest.mark.parametrize(
    "written", ['{"name": "searcher", "arguments": {"task": "a"}}{"b":2}', '{"name": "searcher", ']
)
async def test_malformed_json_goes_back_to_the_policy_and_starts_nobody(play, say, written):
    # case D8
    play.policy("m", say.in_turn(f"<tool_call>{written}</tool_call>", say.answer("Lima")))
    play.policy("s", lambda request: pytest.fail("a sub-agent was started"))
    (rollout,) = await play.rollouts(say.team())
    main = rollout.trajectories[0]
    assert len(rollout.trajectories) == 1
    assert main.turns[0].action == "invalid"
    assert "no valid JSON" in main.turns[0].error
    assert main.messages[3].role == "tool"
    assert main.messages[3].content == f"Error: {main.turns[0].error}"
    assert main.status is Status.OK


async def test_a_call_cut_by_its_limit_is_truncated_and_not_executed(play, say):
    # case D8: finish reason length; here even a whole call stands before the cut
    play.policy("m", say.in_turn(say.call("search", query="x") + "and on and on"))
    tool = ScriptedTool("search", lambda arguments: pytest.fail("executed"))
    limit = len(say.call("search", query="x")) + 3 - len("<tool_call></tool_call>") + 2
    main = await play.main(say.alone(tool, limits=Limits(max_turn_tokens=limit)))
    assert (main.status, main.stop_reason) == (Status.POLICY_FAILED, StopReason.TURN_TOKEN_LIMIT)
    # case B9: nothing was added after the cut
    assert main.loss_mask[-limit:].all()
    assert main.sampled_tokens == limit
    assert main.turns[0].finish_reason == "length"


async def test_an_unknown_name_is_answered_with_the_names_there_are(play, say, search):
    # case D10
    play.policy("m", say.in_turn(say.call("serach", query="x"), say.answer("Lima")))
    main = await play.main(say.alone(search))
    turn = main.turns[0]
    assert (turn.action, turn.action_name) == ("invalid", "serach")
    assert main.messages[3].content == 'Error: Unknown name "serach". Known: search.'


@pytest.mark.parametrize(
    ("limits", "expected", "turns"),
    [
        (Limits(max_turns=3), StopReason.TURN_LIMIT, 3),
        (Limits(max_tokens=9), StopReason.TOKEN_LIMIT, 2),  # 5 + 4 of 5: cut by what is left
        (Limits(max_tokens=10), StopReason.TOKEN_LIMIT, 2),  # 5 + 5: nothing is left for a third
        (Limits(max_turn_tokens=4), StopReason.TURN_TOKEN_LIMIT, 1),
    ],
)
async def test_each_budget_ends_in_its_own_stop_reason(play, say, limits, expected, turns):
    play.policy("m", lambda request: "oops")  # 4 bytes and the end: 5 tokens
    main = await play.main(say.alone(limits=limits))
    assert (main.status, main.stop_reason, len(main.turns)) == (Status.POLICY_FAILED, expected, turns)
    assert main.reply is None


async def test_no_request_exceeds_the_context_and_a_full_one_ends_the_trajectory(play, say):
    # case I4: the scripted client raises on prompt + max_tokens > context, as a server answers 400
    play.policy("m", lambda request: "x" * 20, context_length=400)
    main = await play.main(say.alone(limits=Limits(max_turn_tokens=64)))
    assert main.stop_reason is StopReason.CONTEXT_FULL
    assert main.status is Status.POLICY_FAILED
    sent = [(len(request.prompt_ids), request.sampling.max_tokens) for request in play.clients["m"].requests]
    assert all(prompt + most <= 400 for prompt, most in sent)
    assert len(sent) > 1


@pytest.mark.parametrize(("over", "asked"), [(-96, [96]), (0, []), (54, [])])
async def test_the_client_is_asked_for_what_fits_and_not_at_all_where_nothing_does(play, say, over, asked):
    # case I4: prompts of 96 below, equal to and 54 above the context
    play.policy("m", lambda request: say.answer("x"))
    await play.main(say.alone())
    prompt = len(play.clients["m"].requests[0].prompt_ids)
    play.policy("m", lambda request: "x" * 1000, context_length=prompt - over)
    main = await play.main(say.alone(limits=Limits(max_turn_tokens=512)))
    assert [request.sampling.max_tokens for request in play.clients["m"].requests] == asked
    assert main.stop_reason is StopReason.CONTEXT_FULL
    assert len(main.turns) == len(asked)
    assert len(main.token_ids) == prompt + sum(asked)


async def test_a_huge_tool_output_is_cut_in_tokens_and_leaves_room_for_the_reply(play, say):
    # case D12
    tool = ScriptedTool("search", lambda arguments: "国" * 700_000)
    play.policy("m", say.in_turn(say.call("search", query="x"), say.answer("Lima")), context_length=1024)
    main = await play.main(say.alone(tool, limits=Limits(max_turn_tokens=128)))
    assert main.status is Status.OK
    turn = main.turns[0]
    assert turn.observation_cut
    assert turn.observation_chars == 700_000
    assert len(main.token_ids) <= 1024
    assert play.clients["m"].requests[1].sampling.max_tokens == 128


async def test_a_tool_that_refuses_tells_the_policy(play, say):
    def refuse(arguments):
        raise ToolError("query: too short")

    play.policy("m", say.in_turn(say.call("search", query="x"), say.answer("Lima")))
    main = await play.main(say.alone(ScriptedTool("search", refuse)))
    assert main.status is Status.OK
    assert (main.turns[0].action, main.turns[0].error) == ("tool", "query: too short")
    assert main.messages[3].content == "Error: query: too short"


@pytest.mark.parametrize("error", [ToolOutageError("503"), KeyError("endpoint"), ConnectionError("refused")])
async def test_a_tool_that_breaks_is_an_outage_with_its_reason(play, say, error):
    # case D6
    def broken(arguments):
        raise error

    play.policy("m", say.in_turn(say.call("search", query="x")))
    main = await play.main(say.alone(ScriptedTool("search", broken)))
    assert (main.status, main.stop_reason) == (Status.INFRA_FAILED, StopReason.INFRASTRUCTURE)
    assert main.failure.startswith("tool search: ")
    assert str(error) in main.failure
    assert main.turns[0].action_name == "search"  # what was sampled before is kept


async def test_a_tool_that_returns_no_text_is_an_outage(play, say):
    play.policy("m", say.in_turn(say.call("search", query="x")))
    main = await play.main(say.alone(ScriptedTool("search", lambda arguments: None)))
    assert main.failure == "tool search: returned NoneType, expected text (str)."


@pytest.mark.parametrize("error", [PolicyServerError("server down"), RuntimeError("server down")])
async def test_a_policy_server_that_fails_is_not_the_policys_fault(play, say, error):
    # case D6
    play.policy("m", say.in_turn("oops", error))
    main = await play.main(say.alone())
    assert main.status is Status.INFRA_FAILED
    assert "server down" in main.failure
    assert main.sampled_tokens == 5


@pytest.mark.parametrize("who", ["policy m", "tool search"])
async def test_whatever_never_comes_back_fails_at_its_deadline_and_is_named(play, say, who):
    async def forever(*_, **__):
        await asyncio.sleep(30)

    play.policy("m", say.in_turn(say.call("search", query="x")))
    tool = ScriptedTool("search", str)
    if who == "policy m":
        play.clients["m"].generate = forever
    else:
        tool = HangingTool()
    main = await play.main(say.alone(tool), deadlines=Deadlines(generation_s=0.05, tool_s=0.05))
    assert main.status is Status.INFRA_FAILED
    assert main.failure == f"{who}: nothing came back within 0.05 s"
    assert asyncio.all_tasks() == {asyncio.current_task()}


class HangingTool(ScriptedTool):
    """Never answers."""

    def __init__(self):
        super().__init__("search", str)

    async def call(self, arguments):
        await asyncio.sleep(30)
        return ""


def generation(ids, logprobs, finish="stop"):
    return Generation(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), finish, 0)


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish", "what"),
    [
        ([5, 6, 7], [-0.2, -0.1], "length", "one logprob an id"),  # case I3
        ([], [], "length", "at least one id"),
        ([5, 6], [-1, -1], "stop", "none of the stop ids"),
        ([5] * 65, [-1] * 65, "length", "asked for at most 64"),
        ([5], [0.5], "length", "logprobs above 0"),
        ([5], [-np.inf], "length", "infinite"),
    ],
)
async def test_a_generation_against_the_contract_is_a_failure_of_ours(play, say, ids, logprobs, finish, what):
    play.policy("m", lambda request: "never asked")

    async def generate(prompt_ids, sampling, *, trajectory_id):
        return generation(ids, logprobs, finish)

    play.clients["m"].generate = generate
    main = await play.main(say.alone(limits=Limits(max_turn_tokens=64)))
    assert main.status is Status.INFRA_FAILED
    assert what in main.failure
    assert main.sampled_tokens == 0


async def test_a_logprob_that_the_engine_has_not_is_kept_as_missing(play, say):
    # case I3
    play.policy("m", lambda request: "never asked")
    stop = play.tokenizer.eos_token_id

    async def generate(prompt_ids, sampling, *, trajectory_id):
        return generation([5, 6, stop], [-0.25, np.nan, -0.125])

    play.clients["m"].generate = generate
    main = await play.main(say.alone(limits=Limits(max_turns=1)))
    assert main.status is Status.POLICY_FAILED
    np.testing.assert_array_equal(main.logprobs[main.loss_mask], np.float32([-0.25, np.nan, -0.125]))


async def test_seeds_follow_from_what_a_turn_is(play, say):
    # case I5: four rollouts of one query, two turns each: eight seeds, the same again
    play.policy("m", say.in_turn("oops", say.answer("x")))
    rollouts = await play.rollouts(say.alone(), k=4)
    seeds = [turn.seed for rollout in rollouts for turn in rollout.trajectories[0].turns]
    assert len(set(seeds)) == 8
    assert seeds[3] == seed_of(7, 0, "q0", 1, "main", 1)
    play.policy("m", say.in_turn("oops", say.answer("x")))
    again = await play.rollouts(say.alone(), k=4)
    assert [turn.seed for rollout in again for turn in rollout.trajectories[0].turns] == seeds
    other = await play.rollouts(say.alone(), k=4, iteration=1)
    assert not set(seeds) & {turn.seed for rollout in other for turn in rollout.trajectories[0].turns}


async def test_a_call_beyond_its_limit_is_refused_and_the_policy_may_still_answer(play, say, search):
    play.policy("m", say.in_turn(*[say.call("search", query="x")] * 2, say.answer("Lima")))
    main = await play.main(say.alone(search, limits=Limits(max_tool_calls=1)))
    assert main.status is Status.OK
    assert [turn.error for turn in main.turns] == [None, "refused: the limit of 1 tool calls is reached", None]


async def test_a_call_that_nobody_would_read_is_not_made(play, say):
    play.policy("m", lambda request: say.call("search", query="x"))
    made = []
    tool = ScriptedTool("search", lambda arguments: made.append(1) or "r")
    main = await play.main(say.alone(tool, limits=Limits(max_turns=3)))
    assert (main.stop_reason, len(made)) == (StopReason.TURN_LIMIT, 2)
    budget = Limits(max_tokens=main.turns[0].stop - main.turns[0].start)
    main = await play.main(say.alone(tool, limits=budget), iteration=1)
    assert (main.stop_reason, len(main.turns), len(made)) == (StopReason.TOKEN_LIMIT, 1, 2)


async def test_a_policy_whose_template_opens_thinking_is_read_with_it(make_tokenizer, templates, play, say):
    play.tokenizer = make_tokenizer(templates["opens"])
    play.policy("m", lambda request: f"hm</think>\n\n{say.answer('Lima')}")
    assert (await play.main(say.alone())).reply == "Lima"
    play.policy("m", lambda request: say.answer("Lima"))
    main = await play.main(say.alone(limits=Limits(max_turns=1)))
    assert main.turns[0].error == "<think> is not closed."


async def test_a_policy_without_a_chat_template_fails_before_anything_is_sampled(make_tokenizer, play, say):
    play.tokenizer = make_tokenizer(None)
    play.policy("m", lambda request: pytest.fail("sampled"))
    with pytest.raises(TemplateError, match=r"chat_template.*save the tokenizer"):
        await play.main(say.alone())


async def test_a_tool_and_a_delegate_of_one_name_are_refused(play, say):
    play.policy("m", lambda request: "x")
    team = say.alone(ScriptedTool("main", str), delegates=("main",))
    with pytest.raises(ConfigError, match="main stands for two"):
        await play.main(team)


async def test_cancelling_a_rollout_leaves_nothing_pending(play, say):
    play.policy("m", lambda request: "oops", delay_s=30)
    task = asyncio.create_task(play.main(say.alone()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
