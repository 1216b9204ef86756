"""The program `mgrpo`: its commands, in the order in which its help lists them."""

from importlib.metadata import version
from typing import Annotated

import typer

from flows.commands import blame, deploy, inspect, replay, serve, store, train, transfer, ui, up

app = typer.Typer(
    name="mgrpo",
    help="Train a team of LLM agents with M-GRPO: rollouts, Parquet audit log, alignment, one update per policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mgrpo {version('mgrpo')}")
        raise typer.Exit


@app.callback()
def program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """For options of the program itself. Its help is that of `app`."""


app.command()(train.check)
app.command()(train.train)
app.command()(train.evaluate)
app.command()(deploy.deploy)
app.command()(up.up)
app.command()(up.down)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.command()(store.runs)
app.command()(store.verify)
app.command()(transfer.export)
app.command("import")(transfer.import_run)
app.command()(inspect.inspect)
app.command()(ui.ui)
app.command()(replay.replay)
app.command()(blame.blame)

if __name__ == "__main__":
    app()
