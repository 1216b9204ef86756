"""The board: parents post invocations and wait for replies, each sub-agent's stage serves its own queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from mgrpo_core.errors import ConfigError, InfrastructureError
from mgrpo_core.rollout.ledger import RolloutLedger
from mgrpo_core.trajectories import Trajectory, TrajectoryKey


class Place:
    """One of the places that a stage's concurrency limit grants; given back while its holder waits for others."""

    def __init__(self, limit: asyncio.Semaphore) -> None:
        self._limit = limit
        self._held = False

    async def take(self) -> None:
        await self._limit.acquire()
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._limit.release()


@dataclass(slots=True)
class Invocation:
    """A delegation on the board. It alone here is not frozen: it is the meeting point of two tasks.

    Attributes:
        reply: resolved once, with the trajectory or with the reason why there is none.
        stopped: why whoever waited has given up; None while somebody waits.
        waits_for: agent path of the deeper invocation that it has asked; None while it works itself.
    """

    key: TrajectoryKey
    task: str
    ledger: RolloutLedger
    reply: asyncio.Future[Trajectory | InfrastructureError]
    place: Place | None = field(default=None)
    worker: asyncio.Task[Trajectory] | None = field(default=None)
    stopped: str | None = field(default=None)
    waits_for: str | None = field(default=None)


RunOne = Callable[[Invocation], Awaitable[Trajectory]]


class DelegationBoard:
    """Joins the stages of one iteration in one event loop.

    A limit bounds the invocations of an agent that work. One that waits for a deeper one gives its place back, so no
    chain of delegations can wait for itself, at any depth and with a limit of 1. Every wait ends: by the reply, at the
    deadline, or when the stage that should reply ends.
    """

    def __init__(self, agents: Iterable[str], *, deadline_s: float, grace_s: float = 5.0) -> None:
        """Args:
        agents: who can be asked.
        deadline_s: longest wait for one reply, from posting it, the queue included.
        grace_s: how long a stopped invocation may take to hand over what it has.
        """
        self._queues: dict[str, asyncio.Queue[Invocation | None]] = {name: asyncio.Queue() for name in agents}
        self._served: set[str] = set()
        self._ended: dict[str, str] = {}
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._closed = False

    async def ask(
        self, key: TrajectoryKey, task: str, *, ledger: RolloutLedger, asker: Invocation | None = None
    ) -> Trajectory:
        """Post an invocation and wait for its trajectory.

        Args:
            key: of the invocation; its agent's stage serves it.
            task: what the sub-agent is asked.
            ledger: of the rollout that it belongs to.
            asker: the invocation that asks; None for the main agent.
        Raises: InfrastructureError if no trajectory came of it: deadline, end of the stage, a closed board.
        """
        queue = self._queue_of(key.agent)
        if self._closed:
            raise InfrastructureError(f"{key.agent_path}: the board is closed, the main stage has ended.")
        if key.agent in self._ended:
            raise InfrastructureError(f"{key.agent_path}: {self._ended[key.agent]}")
        invocation = Invocation(key, task, ledger, asyncio.get_running_loop().create_future())
        queue.put_nowait(invocation)
        if asker is not None and asker.place is not None:
            asker.waits_for = key.agent_path
            asker.place.give_back()
        try:
            await asyncio.wait({invocation.reply}, timeout=self._deadline_s)
            if not invocation.reply.done():
                await self._stop(invocation, self._overdue(invocation))
        except asyncio.CancelledError:
            await self._stop(invocation, "stopped, because nobody waits for its reply any more")
            raise
        if asker is not None and asker.place is not None:
            await asker.place.take()
            asker.waits_for = None
        reply = invocation.reply.result()
        if isinstance(reply, InfrastructureError):
            raise reply
        return reply

    async def serve(self, agent: str, limit: int, run_one: RunOne) -> None:
        """Serve the queue of `agent` until the board is closed; at most `limit` of its invocations work at once.

        Args:
            agent: whose queue.
            limit: at least 1.
            run_one: plays one invocation. What it raises ends the stage and fails everything that waits for it.
        """
        queue = self._queue_of(agent)
        if limit < 1:
            raise ConfigError(f"agents.{agent}.concurrency: {limit}, expected at least 1.")
        if agent in self._served:
            raise ConfigError(f"the queue of {agent!r} is served already. Start one stage an agent.")
        self._served.add(agent)
        places = asyncio.Semaphore(limit)
        why = "its stage has ended"
        try:
            async with asyncio.TaskGroup() as workers:
                while (invocation := await queue.get()) is not None:
                    if invocation.reply.done():
                        continue
                    worker = workers.create_task(
                        self._work(invocation, places, run_one), name=invocation.key.agent_path
                    )
                    invocation.worker = worker
                    # In a callback: a task that is cancelled before its first step runs no line of its own.
                    worker.add_done_callback(lambda done, posted=invocation: _resolve(posted, done))
        except BaseExceptionGroup as group:
            why = f"its stage ended in an error: {group.exceptions[0]!r}"
            raise group.exceptions[0] from group
        finally:
            self._ended[agent] = why
            while not queue.empty():
                left = queue.get_nowait()
                if left is not None and not left.reply.done():
                    left.reply.set_result(InfrastructureError(f"{left.key.agent_path}: {why}"))

    def close(self) -> None:
        """No invocation will be posted any more: stages end when theirs are done. Calling it twice does nothing."""
        if self._closed:
            return
        self._closed = True
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _work(self, invocation: Invocation, places: asyncio.Semaphore, run_one: RunOne) -> Trajectory:
        place = Place(places)
        await place.take()
        invocation.place = place
        try:
            return await run_one(invocation)
        finally:
            place.give_back()

    async def _stop(self, invocation: Invocation, why: str) -> None:
        """Have an invocation end now; afterwards its reply is resolved."""
        if invocation.reply.done():
            return
        invocation.stopped = why
        if invocation.worker is not None:
            invocation.worker.cancel()
            await asyncio.wait({invocation.reply}, timeout=self._grace_s)
        if not invocation.reply.done():
            invocation.reply.set_result(InfrastructureError(f"{invocation.key.agent_path}: {why}"))

    def _overdue(self, invocation: Invocation) -> str:
        agent = invocation.key.agent
        if agent not in self._served:
            state = f"no stage serves {agent!r}; start one"
        elif invocation.place is None:
            state = f"it is still queued behind the limit of {agent!r}; raise agents.{agent}.concurrency"
        elif invocation.waits_for is not None:
            state = f"it waits for {invocation.waits_for} itself"
        else:
            state = "it is at work; look at its policy's server and at its tools"
        return f"no reply within {self._deadline_s:g} s: {state}, or raise rollout.reply_deadline_s."

    def _queue_of(self, agent: str) -> asyncio.Queue[Invocation | None]:
        if agent not in self._queues:
            raise ConfigError(
                f"{agent!r} cannot be asked. On the board: {', '.join(sorted(self._queues)) or 'nobody'}."
            )
        return self._queues[agent]


def _resolve(invocation: Invocation, worker: asyncio.Task[Trajectory]) -> None:
    if invocation.reply.done():
        return
    path = invocation.key.agent_path
    if worker.cancelled():
        invocation.reply.set_result(InfrastructureError(f"{path}: {invocation.stopped or 'its stage was cancelled'}"))
    elif (error := worker.exception()) is not None:
        invocation.reply.set_result(InfrastructureError(f"{path}: its stage broke: {error!r}"))
    else:
        invocation.reply.set_result(worker.result())
