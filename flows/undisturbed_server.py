"""Prefect's temporary server, out of the terminal's reach: Ctrl-C is ours to handle, and we tell it how the run ended.

As Prefect starts it, it is in our process group: Ctrl-C ends it at the same moment, and Prefect then asks for minutes
after a server that is gone. And it outlives a process that is killed.
"""

import os
import subprocess
import sys
from typing import Any

import prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

from infra.training.die_with_parent import bound_to_this_process


class UndisturbedServer(SubprocessASGIServer):
    """In a session of its own; on Linux it dies with the thread that started it, however that ends.

    Prefect keeps one server a process: made first, this is the one that all of Prefect gets and uses.
    """

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        # Prefect has no setting for how the process is started, only this method: its own command, started otherwise.
        environment = {
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
        }
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(prefect.__module_path__.parent)]
        command += ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on", "--log-level", "error"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        return subprocess.Popen(  # noqa: S603  # our own command line
            bound_to_this_process(command, environment),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
