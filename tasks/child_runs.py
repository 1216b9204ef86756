"""A run of a deployment, awaited: started once per attempt, found again after a crash, never doubled, never for ever.

Prefect's `run_deployment` neither raises for a failed run nor cancels one that took too long, and a parent that is
started again would start it twice. Here each attempt has an idempotency key, so that whoever asks again for the same
work gets the run that does it; every wait has a deadline; and a failure carries the run's own words and its link.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_UI_URL
from prefect.states import Cancelled, Cancelling

from mgrpo_core.errors import ConfigError, UpdateFailedError
from tasks.flow_runs import pass_on_cancellation
from tasks.logs import stage_logger

T = TypeVar("T")

POLL_S = 1.0
"""Between two looks at a run."""
REMIND_S = 60.0
"""Between two lines about a run that no worker takes."""
CANCEL_S = 60.0
"""How long a run that was asked to stop may take to do so; then it is declared Cancelled."""


@dataclass(frozen=True, slots=True)
class ChildRun:
    """What to run.

    Attributes:
        deployment: `flow/deployment`.
        pool: its work pool, for people.
        name: of the flow run.
        key: of the work: equal keys are the same work, whoever asks.
        parameters: references, a few kilobytes at most.
    """

    deployment: str
    pool: str
    name: str
    key: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long. Seconds.

    Attributes:
        attempts: runs that this caller may start.
        start_s: longest wait for a worker.
        run_s: longest run, from its start.
        server_s: how long a server that does not answer is asked again.
    """

    attempts: int
    start_s: float
    run_s: float
    server_s: float


async def completed_run(child: ChildRun, patience: Patience, is_done: Callable[[], bool]) -> UUID:
    """Id of a Completed run of this work, found or started.

    Runs that failed before this call, for an earlier caller, are stepped over and do not count as attempts. A run that
    is Completed although the work is not there (its result was removed since) is stepped over too.

    Raises:
        UpdateFailedError: as many runs as `attempts` failed; with the last one's words and link.
        ConfigError: there is no such deployment.
    """
    started, number = 0, 0
    while True:
        found = await _patiently(patience, functools.partial(_start, child, number))
        old = found.state is not None and found.state.is_final()
        run, late = (found, "") if old else await _final(child, patience, found)
        if run.state is not None and run.state.is_completed() and (not old or await asyncio.to_thread(is_done)):
            return run.id
        number += 1
        if old:
            continue
        started += 1
        problem = f"{child.deployment}, run {run.name}: {_words(run, late)} {_link(run.id)}"
        if started >= patience.attempts:
            raise UpdateFailedError(
                f"{problem} {started} of {patience.attempts} attempts failed; nothing was committed. Mend the cause "
                "and start the iteration again: what is staged and updated is kept."
            )
        stage_logger().warning("%s Attempt %s of %s follows.", problem, started + 1, patience.attempts)


async def _start(child: ChildRun, number: int, client: PrefectClient) -> FlowRun:
    try:
        return await arun_deployment(
            child.deployment,
            client=client,
            parameters=child.parameters,
            timeout=0,
            flow_run_name=child.name,
            idempotency_key=f"{child.key}#{number}",
        )
    except ObjectNotFound as error:
        raise ConfigError(
            f"{child.deployment}: the Prefect server has no such deployment. Write it with `mgrpo deploy CONFIG`, or "
            "set execution.mode: embedded."
        ) from error


async def _final(child: ChildRun, patience: Patience, run: FlowRun) -> tuple[FlowRun, str]:
    """The run once it is final; asked to stop when it takes too long, and in what way it did."""
    stage_logger().info("Waiting for %s, run %s. %s", child.deployment, run.name, _link(run.id))
    try:
        return await _watched(child, patience, run)
    except asyncio.CancelledError:
        await pass_on_cancellation(run.id)
        raise


async def _watched(child: ChildRun, patience: Patience, run: FlowRun) -> tuple[FlowRun, str]:
    begun = told = time.monotonic()
    running_since: float | None = None
    late = ""
    while run.state is None or not run.state.is_final():
        now = time.monotonic()
        waiting = run.state is None or run.state.is_scheduled() or run.state.is_pending()
        running_since = None if waiting else running_since or now
        if waiting and now - begun > patience.start_s:
            late = f"no worker of work pool {child.pool} took it within {patience.start_s:.0f} s"
        elif running_since is not None and now - running_since > patience.run_s:
            late = f"it ran for more than {patience.run_s:.0f} s"
        elif waiting and now - told > REMIND_S:
            told = now
            stage_logger().warning(
                "No worker has taken %s for %.0f s. Start one: prefect worker start --pool %s",
                run.name,
                now - begun,
                child.pool,
            )
        if late:
            return await _stopped(patience, run, late), late
        await asyncio.sleep(POLL_S)
        run = await _read(patience, run.id)
    return run, late


async def _stopped(patience: Patience, run: FlowRun, why: str) -> FlowRun:
    """Ask the run to stop, and wait until it has: no second attempt before the first has ended."""
    stage_logger().warning("Run %s is cancelled: %s.", run.name, why)
    await _set_state(patience, run.id, Cancelling(message=why))
    deadline = time.monotonic() + CANCEL_S
    while True:
        there = await _read(patience, run.id)
        if there.state is not None and there.state.is_final():
            return there
        if time.monotonic() > deadline:  # its worker is gone, and with it whoever could stop it
            end = Cancelled(message=f"{why}; it did not stop within {CANCEL_S:.0f} s")
            await _set_state(patience, run.id, end, force=True)
        await asyncio.sleep(POLL_S)


async def _read(patience: Patience, run: UUID) -> FlowRun:
    return await _patiently(patience, lambda client: client.read_flow_run(run))


async def _set_state(patience: Patience, run: UUID, state: State, *, force: bool = False) -> None:
    await _patiently(patience, lambda client: client.set_flow_run_state(run, state, force=force))


async def _patiently(patience: Patience, ask: Callable[[PrefectClient], Awaitable[T]]) -> T:
    """Ask the server; while it is away or its database is, ask again.

    Raises: UpdateFailedError once it has not answered for `server_s`.
    """
    deadline = time.monotonic() + patience.server_s
    while True:
        try:
            async with get_client() as client:
                return await ask(client)
        except (httpx.TransportError, PrefectHTTPStatusError, RuntimeError) as error:
            if not _is_outage(error):
                raise
            if time.monotonic() > deadline:
                raise UpdateFailedError(
                    f"the Prefect server did not answer for {patience.server_s:.0f} s ({error}). Updates that run go "
                    "on; start the iteration again when it is back, and it takes them up."
                ) from error
            stage_logger().warning("The Prefect server does not answer (%s); asking again.", type(error).__name__)
            await asyncio.sleep(POLL_S)


def _is_outage(error: Exception) -> bool:
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code >= 500
    # Prefect's client wraps a failed connection at its own start into a RuntimeError.
    return isinstance(error, httpx.TransportError) or "Failed to reach API" in str(error)


def _words(run: FlowRun, late: str) -> str:
    state = run.state
    assert state is not None, "only a final run is described"
    said = (late or state.message or "").strip()[:2000]
    return f"{state.name}: {said}." if said else f"{state.name}."


def _link(run: UUID) -> str:
    ui = PREFECT_UI_URL.value()
    return f"{ui}/runs/flow-run/{run}" if ui else f"(flow run {run})"
