"""The pages on a port of this machine."""

import contextlib
import importlib
from collections.abc import Collection
from typing import Any

from waitress.server import create_server

from infra.store.runs import open_store, require_run
from infra.ui.app import build_app
from infra.ui.run_reader import RunReader
from mgrpo_core.errors import ConfigError

_THREADS = 8


def pages_server(store: str, run: str, *, host: str, port: int, hosts: Collection[str] = ()) -> Any:
    """A server that listens; `run()` it until Ctrl-C. Its `effective_port` is the port, where 0 was asked for.

    Args:
        store: the run's store.
        run: its name.
        host: address to listen on.
        port: to listen on; 0 = any that is free.
        hosts: names besides this machine's own that people may use.

    Raises:
        StoreError: there is no such run.
        ConfigError: the address cannot be listened on.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")  # pyarrow imports it at first use, while Plotly in another thread looks at it
    app = build_app(RunReader(require_run(open_store(store), run)), {host, *hosts})
    try:
        return create_server(app.server, host=host, port=port, threads=_THREADS, ident="mgrpo")
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error}). Give another --port, or 0 for any."
        ) from error
