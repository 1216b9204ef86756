"""The stages of an iteration's rollouts, side by side in one event loop: the main agent's, one for each sub-agent."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mgrpo_core.dialogue.template import ChatTokenizer
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.actor import actor_of
from mgrpo_core.rollout.agents import Team
from mgrpo_core.rollout.controller import Controller
from mgrpo_core.rollout.deadlines import Deadlines
from mgrpo_core.rollout.delegation import DelegationBoard, Invocation
from mgrpo_core.rollout.ledger import RolloutLedger
from mgrpo_core.rollout.protocols import PolicyClient
from mgrpo_core.side_by_side import first_error
from mgrpo_core.trajectories import PathStep, Query, Rollout, Trajectory, TrajectoryKey

OnGroup = Callable[[Query, tuple[Rollout, ...]], Awaitable[None]]
"""Gets a query's K rollouts, in the order of their indices, when the last of them has ended."""

Wanted = Callable[[], bool]
"""Whether a group that has not begun should; those that have begun are finished."""

OnTrajectory = Callable[[Trajectory], None]
"""Gets every trajectory as it ends, whatever its status: for progress."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Which rollouts. Identities and seeds follow from `run`, `iteration` and `seed`, never from the order of arrival.

    Attributes:
        run: name of the run.
        seed: of the run.
        rollouts_per_query: K.
        concurrency: rollouts in flight.
        reply_deadline_s: longest wait for one reply of a sub-agent, its queue included.
        deadlines: longest waits for policies and tools.
    """

    run: str
    iteration: int
    seed: int
    rollouts_per_query: int
    concurrency: int = 256
    reply_deadline_s: float = 600.0
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        for name in ("rollouts_per_query", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}: {getattr(self, name)}, expected at least 1.")


class RolloutStages:
    """One iteration's stages over one board. `run_main` runs once and closes the board; `serve` then returns."""

    def __init__(
        self,
        team: Team,
        plan: RolloutPlan,
        *,
        clients: Mapping[str, PolicyClient],
        tokenizers: Mapping[str, ChatTokenizer],
        on_trajectory: OnTrajectory | None = None,
    ) -> None:
        """Make every agent of the team ready. Clients and tokenizers are by policy.

        Raises: ConfigError or TemplateError for what no rollout could succeed with.
        """
        self._team = team
        self._plan = plan
        self._on_trajectory = on_trajectory
        self._actors = {name: actor_of(team, name, clients, tokenizers) for name in (team.main, *team.sub_agents)}
        self._board = DelegationBoard(team.sub_agents, deadline_s=plan.reply_deadline_s)

    @property
    def sub_agents(self) -> tuple[str, ...]:
        """Agents that need a stage: call `serve` for each."""
        return self._team.sub_agents

    async def run_main(self, queries: Iterable[Query], on_group: OnGroup, wanted: Wanted = lambda: True) -> None:
        """Roll out every query K times; hand over each group when it is whole.

        A failure of ours ends its own rollout only, in a status. Whatever is raised, by `on_group` too, ends the stage.

        Args:
            queries: to roll out; their groups begin in this order.
            on_group: gets the groups.
            wanted: asked as a group would begin; once it says no, the groups left are not made.
        """
        limit = asyncio.Semaphore(self._plan.concurrency)
        try:
            async with asyncio.TaskGroup() as groups:
                for query in queries:
                    groups.create_task(self._group(query, limit, on_group, wanted), name=query.query_id)
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._board.close()

    async def serve(self, agent: str, limit: int) -> None:
        """Serve a sub-agent's invocations, `limit` at once, until the main stage has ended."""
        await self._board.serve(agent, limit, self._invocation)

    async def run(
        self,
        queries: Iterable[Query],
        on_group: OnGroup,
        limits: Mapping[str, int] | None = None,
        wanted: Wanted = lambda: True,
    ) -> None:
        """All stages at once: for whoever needs no task of its own for each.

        Args:
            queries: to roll out.
            on_group: gets the groups.
            limits: invocations at once, by sub-agent; the plan's concurrency where it names none.
            wanted: see `run_main`.
        """
        limits = limits or {}
        try:
            async with asyncio.TaskGroup() as stages:
                for agent in self.sub_agents:
                    stages.create_task(self.serve(agent, limits.get(agent, self._plan.concurrency)), name=agent)
                stages.create_task(self.run_main(queries, on_group, wanted), name=self._team.main)
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _group(self, query: Query, limit: asyncio.Semaphore, on_group: OnGroup, wanted: Wanted) -> None:
        tasks: list[asyncio.Task[Rollout]] = []
        async with asyncio.TaskGroup() as group:
            for index in range(self._plan.rollouts_per_query):
                await limit.acquire()
                if index == 0 and not wanted():
                    limit.release()
                    return
                tasks.append(group.create_task(self._rollout(query, index, limit)))
        await on_group(query, tuple(task.result() for task in tasks))

    async def _rollout(self, query: Query, index: int, slot: asyncio.Semaphore) -> Rollout:
        """Takes over a slot, and gives it back."""
        plan, main = self._plan, self._team.main
        try:
            ledger = RolloutLedger(query.query_id, index, self._team.max_rollout_delegations)
            key = TrajectoryKey(plan.run, plan.iteration, query.query_id, index, (PathStep(main, 0),))

            async def delegate(child: TrajectoryKey, task: str) -> Trajectory:
                return await self._board.ask(child, task, ledger=ledger)

            controller = Controller(
                self._actors[main],
                key,
                query.question,
                seed=plan.seed,
                ledger=ledger,
                delegate=delegate,
                deadlines=plan.deadlines,
            )
            self._ended(ledger, await controller.run())
            return ledger.rollout()
        finally:
            slot.release()

    async def _invocation(self, invocation: Invocation) -> Trajectory:
        async def delegate(child: TrajectoryKey, task: str) -> Trajectory:
            return await self._board.ask(child, task, ledger=invocation.ledger, asker=invocation)

        controller = Controller(
            self._actors[invocation.key.agent],
            invocation.key,
            invocation.task,
            seed=self._plan.seed,
            ledger=invocation.ledger,
            delegate=delegate,
            deadlines=self._plan.deadlines,
        )
        try:
            trajectory = await controller.run()
        except asyncio.CancelledError:
            if invocation.stopped is None:
                raise
            # Stopped by the board, not with the whole stage: what it has said is kept, with the reason.
            trajectory = controller.failed(invocation.stopped)
        self._ended(invocation.ledger, trajectory)
        return trajectory

    def _ended(self, ledger: RolloutLedger, trajectory: Trajectory) -> None:
        ledger.add(trajectory)
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)
