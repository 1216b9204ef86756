"""What two stores of the same run must agree on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def iteration_folder(store: Path, iteration: int = 0, run: str = "r") -> Path:
    return store / run / "iterations" / f"{iteration:08d}"


def tables_sha256(store: Path, iteration: int = 0) -> dict[str, str]:
    """Hash of every Parquet table of a committed iteration."""
    folder = iteration_folder(store, iteration)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.parquet"))
    }


def weights_sha256(store: Path) -> dict[str, str]:
    """Hash of every file of every policy version; what a killed writer left under a temporary name is no file of it."""
    folder = store / "r" / "policies"
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".tmp-")
    }


def metrics_of(store: Path, iteration: int = 0, run: str = "r") -> dict[str, float]:
    """An iteration's metrics but for its times."""
    found = json.loads((iteration_folder(store, iteration, run) / "metrics.json").read_text())
    return {name: value for name, value in found.items() if not name.startswith("seconds/")}


def manifest_of(store: Path, iteration: int = 0, run: str = "r") -> dict[str, Any]:
    return json.loads((iteration_folder(store, iteration, run) / "manifest.json").read_text())


def rows_of(store: Path, table: str, iteration: int = 0, run: str = "r") -> list[dict[str, Any]]:
    """Rows of a table: `rewards`, `trajectories/main-0000`, …"""
    return pq.read_table(iteration_folder(store, iteration, run) / f"{table}.parquet").to_pylist()


def versions_of(store: Path, policy: str, run: str = "r") -> list[str]:
    return sorted(path.name for path in (store / run / "policies" / policy).iterdir())
