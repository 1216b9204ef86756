"""Start and stop what a run on work pools needs, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes
from flows.commands.options import Overrides
from flows.load_config import load_config
from infra.deploy.local.settings import Database

Home = Annotated[Path, typer.Option("--home", help="Folder for logs, data and keys of the local services.")]
DEFAULT_HOME = Path("mgrpo-out/up")


def up(
    source: Annotated[str, typer.Argument(help="The preset or YAML file whose work pools get workers.")] = "quickstart",
    home: Home = DEFAULT_HOME,
    detach: Annotated[bool, typer.Option("--detach", help="Leave them running; `mgrpo down` stops them.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="Of server, s3 and mlflow, with commas between.")] = None,
    no_workers: Annotated[bool, typer.Option("--no-workers", help="Start no workers.")] = False,
    database: Annotated[Database, typer.Option("--database", help="Of the Prefect server.")] = "postgres",
    server_port: Annotated[int, typer.Option("--server-port", help="Of the Prefect server; 0 = any free.")] = 4200,
    s3_port: Annotated[int, typer.Option("--s3-port", help="Of the S3 server.")] = 8333,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", help="Of the MLflow server.")] = 5000,
    postgres_port: Annotated[int, typer.Option("--postgres-port", help="Of PostgreSQL.")] = 54320,
    overrides: Overrides = None,
) -> None:
    """Start what a run on work pools needs, on this machine: Prefect and its database, S3, MLflow, a worker per pool.

    Ctrl-C (exit code 130) and SIGTERM (143) stop all of it; so does `mgrpo down`.
    """
    with errors_to_exit_codes(interrupted="All stopped."):
        from flows.up import local_settings, start

        settings = local_settings(
            load_config(source, overrides or []),
            only=only,
            workers=not no_workers,
            database=database,
            ports=(server_port, s3_port, mlflow_port, postgres_port),
        )
        start(home, settings, detach=detach)


def down(home: Home = DEFAULT_HOME) -> None:
    """Stop what `mgrpo up` started, and keep its data."""
    with errors_to_exit_codes(interrupted="All stopped."):
        from flows.up import stop

        stop(home)
