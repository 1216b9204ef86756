"""The program `mgrpo`: its commands, in the order in which its help lists them."""

import typer

from flows.commands import blame, deploy, inspect, replay, serve, store, train, transfer, ui, up

app = typer.Typer(
    name="mgrpo",
    help="Train a team of LLM agents with M-GRPO: rollouts, Parquet audit log, alignment, one update per policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

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
