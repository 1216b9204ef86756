"""Look at a run in a browser."""

from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes
from flows.commands.options import DEFAULT_STORE, RunName, Store
from mgrpo_core.errors import ConfigError

_EXTRA = ("dash", "dash_ag_grid", "waitress")


def ui(
    run: RunName,
    store: Store = DEFAULT_STORE,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 = any that is free.")] = 8050,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Whoever reaches it reads the whole run.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Another name people reach it by; may be repeated.")
    ] = None,
) -> None:
    """Serve pages about a run: its curves, its trajectories, each rollout as a tree. Reads only; Ctrl-C stops it."""
    with errors_to_exit_codes(interrupted="Stopped."):
        try:
            from infra.ui.serving import pages_server
        except ModuleNotFoundError as error:
            if error.name not in _EXTRA:
                raise
            raise ConfigError(
                f"mgrpo ui needs {error.name}, of the extra `ui`. Install it: pip install 'mgrpo[ui]'"
            ) from None
        server = pages_server(store, run, host=host, port=port, hosts=allow_host or [])
        name = f"[{host}]" if ":" in host else host
        typer.echo(f"Run {run}: http://{name}:{server.effective_port}/ (Ctrl-C stops it)")
        server.run()
