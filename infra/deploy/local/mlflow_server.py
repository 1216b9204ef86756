"""The MLflow server: runs in SQLite, artifacts in a folder, both in the state folder."""

import sys
from pathlib import Path

from infra.deploy.local import http_calls
from infra.deploy.local.home import LocalHome
from infra.deploy.local.ports import HOST
from infra.deploy.local.program import Program
from infra.deploy.settings import MLFLOW_SERVER


def mlflow_url(port: int) -> str:
    """For MLFLOW_TRACKING_URI and for a browser."""
    return f"http://{HOST}:{port}"


def mlflow_folder(home: LocalHome) -> Path:
    """Of its data."""
    return home.data / "mlflow"


def mlflow_program(home: LocalHome, port: int, *, step: int) -> Program:
    """The server, as one process that serves and one that watches it."""
    folder = mlflow_folder(home)
    return Program(
        name="mlflow",
        title="MLflow server",
        place=mlflow_url(port),
        command=(
            sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
            "--artifacts-destination", str(folder / "artifacts"),
        ),
        environment=MLFLOW_SERVER,
        directory=folder,
        answers=lambda _: http_calls.answers(f"{mlflow_url(port)}/health"),
        deadline_s=120,  # the first start makes the tables
        step=step,
    )  # fmt: skip
