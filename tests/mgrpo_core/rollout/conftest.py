"""A small team over scripted policies: main -> searcher (one tool)."""

import json
from collections.abc import Callable, Mapping

import pytest

from mgrpo_core.rollout.agents import AgentSpec, Limits, Team
from mgrpo_core.rollout.scripted import ScriptedPolicy, ScriptedTool
from mgrpo_core.rollout.stages import RolloutPlan, RolloutStages
from mgrpo_core.trajectories import Query, Rollout

NO_LIMITS = Limits()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(text: str) -> str:
    return f"<answer>{text}</answer>"


class Play:
    """One iteration over scripted policies."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer
        self.clients: dict[str, ScriptedPolicy] = {}

    def policy(self, name: str, script: Callable, **settings: object) -> "Play":
        self.clients[name] = ScriptedPolicy(name, self.tokenizer, script, **settings)
        return self

    def stages(self, team: Team, k: int = 1, on_trajectory=None, **plan: object) -> RolloutStages:
        return RolloutStages(
            team,
            RolloutPlan(**{"run": "r", "iteration": 0, "seed": 7, "rollouts_per_query": k, **plan}),
            clients=self.clients,
            tokenizers=dict.fromkeys(self.clients, self.tokenizer),
            on_trajectory=on_trajectory,
        )

    async def rollouts(
        self, team: Team, queries: int = 1, k: int = 1, limits: Mapping[str, int] | None = None, **plan: object
    ) -> list[Rollout]:
        found: list[Rollout] = []

        async def keep(query: Query, group: tuple[Rollout, ...]) -> None:
            assert [one.rollout_index for one in group] == list(range(k))
            found.extend(group)

        asked = [Query(f"q{index}", f"Question {index}?", ("Lima",)) for index in range(queries)]
        await self.stages(team, k, **plan).run(asked, keep, limits)
        return sorted(found, key=lambda one: (one.query_id, one.rollout_index))

    async def main(self, team: Team, **settings: object):
        (rollout,) = await self.rollouts(team, **settings)
        return rollout.trajectories[0]


@pytest.fixture
def play(make_tokenizer) -> Play:
    return Play(make_tokenizer())


@pytest.fixture(scope="session")
def search() -> ScriptedTool:
    return ScriptedTool("search", lambda arguments: f"found {arguments['query']}")


def team_of(
    *tools: ScriptedTool, main_limits: Limits = NO_LIMITS, sub_limits: Limits = NO_LIMITS, **bounds: int
) -> Team:
    return Team(
        "main",
        {
            "main": AgentSpec("main", "m", "Lead.", delegates=("searcher",), limits=main_limits),
            "searcher": AgentSpec("searcher", "s", "Search.", "Finds facts.", tools=tools, limits=sub_limits),
        },
        **bounds,
    )


def alone(*tools: ScriptedTool, limits: Limits = NO_LIMITS, **spec: object) -> Team:
    """A team of one."""
    return Team("main", {"main": AgentSpec("main", "m", "Lead.", tools=tools, limits=limits, **spec)})


def in_turn(*says: object) -> Callable:
    """A script that says these things, one a turn, and the last of them from then on."""
    return lambda request: says[min(request.turn, len(says) - 1)]


@pytest.fixture(scope="session")
def say():
    """Helpers that write turns, teams and scripts."""

    class Say:
        call = staticmethod(call)
        answer = staticmethod(answer)
        team = staticmethod(team_of)
        alone = staticmethod(alone)
        in_turn = staticmethod(in_turn)

    return Say
