"""Who moved a policy."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes, print_json
from flows.commands.options import DEFAULT_STORE, AsJson, RunName, Store
from mgrpo_core.errors import ConfigError


def blame(
    run: RunName,
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    store: Store = DEFAULT_STORE,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Who made this version of it; default: the newest.")
    ] = None,
    iteration: Annotated[
        int | None, typer.Option("--iteration", min=0, help="Whose update, in place of a version.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many.")] = 10,
    trajectory: Annotated[
        list[str] | None, typer.Option("--trajectory", help="This one instead, by its id or its beginning; repeatable.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Their exact gradients, and ranked by their norms. Loads the policy.")
    ] = False,
    delegations: Annotated[
        bool, typer.Option("--delegations", help="Invocations, and others' advantages had each of them not been.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Who moved a policy: trajectories ranked by |weight x advantage|, or by gradient norm; what each delegation did.

    Reads small tables only, but for --gradients. Exit code 1 for damaged data, 2 for no such run, policy or version.
    """
    with errors_to_exit_codes(interrupted="Interrupted. Nothing was changed.", damaged=1):
        from infra.blame import ranking
        from infra.blame.delegations import delegations as delegations_of
        from infra.blame.render import render_blame, render_delegations
        from infra.store.making_sense import making_sense_of
        from infra.store.runs import open_store, require_run

        found = require_run(open_store(store), run)
        if delegations:
            if gradients or trajectory:
                raise ConfigError("--delegations counts in advantages: it takes neither --gradients nor --trajectory.")
            with making_sense_of(found):
                credit = delegations_of(found, policy, store=store, version=version, iteration=iteration, top=top)
            print_json(credit.to_json()) if as_json else render_delegations(credit)
            return
        with tempfile.TemporaryDirectory(prefix="mgrpo-policies-") as cache, making_sense_of(found):
            report = ranking.blame(
                found,
                policy,
                store=store,
                version=version,
                iteration=iteration,
                top=top,
                named=trajectory or (),
                gradients=gradients,
                cache=Path(cache),
            )
        print_json(report.to_json()) if as_json else render_blame(report)
