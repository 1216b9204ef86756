"""Serve a policy with vLLM."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes
from flows.commands.options import DEFAULT_STORE, Store


def serve(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    store: Store = DEFAULT_STORE,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Of the policy; default: the newest committed.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Whoever reaches it can change the weights.")
    ] = "127.0.0.1",
    python: Annotated[
        Path | None,
        typer.Option("--python", envvar="MGRPO_VLLM_PYTHON", help="Of vLLM's environment; default: .venv-vllm here."),
    ] = None,
    cache: Annotated[Path, typer.Option("--cache", help="Folder for weights that vLLM cannot read from the store.")] = (
        Path("mgrpo-out/policies")
    ),
) -> None:
    """Serve a policy version with vLLM, for the config's `policies.POLICY.servers`. `make vllm` installs it.

    Options that are not named here go to vLLM's server: `mgrpo serve main --run r --tensor-parallel-size 4`.
    SIGINT and SIGTERM are handed to the server, whose exit code is the command's.
    """
    with errors_to_exit_codes():
        from flows.serve import Serving, serve_policy

        serving = Serving(policy, run, store, version, host, port, python, cache, tuple(context.args))
        code = serve_policy(serving, lambda line: typer.secho(line, err=True))
    raise typer.Exit(code)
