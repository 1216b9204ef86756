"""What a store holds, and whether it is sound."""

import typer

from flows.commands.endings import errors_to_exit_codes, print_json
from flows.commands.options import DEFAULT_STORE, AsJson, RunName, Store


def runs(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """List the runs of a store: iterations, policy versions, last commit."""
    with errors_to_exit_codes():
        from flows.runs import list_runs, render_runs

        found = list_runs(store)
        if as_json:
            print_json(found)
        else:
            render_runs(found)


def verify(run: RunName, store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Check every file, row and link of a run against its manifests. Exit code 1 if anything is wrong."""
    with errors_to_exit_codes():
        from flows.runs import render_verification, verification_of

        report = verification_of(store, run)
        if as_json:
            print_json(report)
        else:
            render_verification(report)
        if not report["sound"]:
            raise typer.Exit(1)
