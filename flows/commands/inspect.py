"""Look at what happened in an iteration."""

from typing import Annotated, Literal

import typer

from flows.commands.endings import errors_to_exit_codes, print_json
from flows.commands.options import DEFAULT_STORE, AsJson, RunName, Store
from mgrpo_core.trajectories import Status


def inspect(
    run: RunName,
    iteration: Annotated[int, typer.Argument(min=0, help="Number of a committed iteration.")],
    query: Annotated[str | None, typer.Argument(help="Id of a query, or its position, as @0. Default: all.")] = None,
    store: Store = DEFAULT_STORE,
    rollout: Annotated[
        int | None, typer.Option("--rollout", min=0, help="One rollout of the query, as a tree.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Only what it did; or a trajectory's path, as main/0:searcher.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only where this was said, whatever the case.")] = None,
    sign: Annotated[Literal["+", "-", "0"] | None, typer.Option("--sign", help="Of the advantage.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="How the trajectory ended.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Of a rollout: its tokens, coloured by how likely they were.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out: long texts, prompts, all queries.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at an iteration: its queries, the rollouts of one, or a rollout as a tree with rewards and advantages.

    Exit code 1 for damaged data, 2 for no such run, iteration, query or rollout.
    """
    with errors_to_exit_codes(interrupted="Interrupted. Nothing was changed.", damaged=1):
        from infra.inspection.report import Asked, inspect_iteration
        from infra.store.making_sense import making_sense_of
        from infra.store.runs import open_store, require_run

        asked = Asked(query, rollout, agent, text, sign, None if status is None else str(status), tokens)
        stored_run = require_run(open_store(store), run)
        with making_sense_of(stored_run):
            found = inspect_iteration(stored_run, iteration, asked)
        if as_json:
            print_json(found.to_json())
        else:
            from infra.inspection.render import render_found

            render_found(found, store, full=full)
