"""`mgrpo runs` and `mgrpo verify`: what a store holds, and whether it is whole."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.store.manifests import read_manifest
from infra.store.runs import StoredRun, open_store, require_run, run_names
from infra.store.stored_iteration import committed_iterations
from infra.store.verify import verify_run
from mgrpo_core.errors import StoreError


def list_runs(store: str) -> list[dict[str, Any]]:
    """A record a run. A run that cannot be read is listed with the reason."""
    files = open_store(store)
    found: list[dict[str, Any]] = []
    for name in run_names(files):
        record: dict[str, Any] = {"run": name, "iterations": 0, "committed_at": None, "policies": {}, "problem": None}
        try:
            there = committed_iterations(StoredRun(files, name))
            record["iterations"] = len(there)
            if there:
                manifest = read_manifest(files, name, there[-1]).manifest
                record["committed_at"] = manifest.created_at
                record["policies"] = {policy: step.to_version for policy, step in manifest.policies.items()}
        except StoreError as error:
            record["problem"] = str(error)
        found.append(record)
    return found


def render_runs(found: list[dict[str, Any]]) -> None:
    """The records as a table."""
    if not found:
        Console().print("No runs. Start one with `mgrpo train quickstart`.")
        return
    table = Table("run", "iterations", "policy versions", "last commit", "problem")
    for one in found:
        policies = ", ".join(f"{policy} {version}" for policy, version in one["policies"].items())
        table.add_row(one["run"], str(one["iterations"]), policies, one["committed_at"] or "", one["problem"] or "")
    Console().print(table)


def verification_of(store: str, run: str) -> dict[str, Any]:
    """What `verify_run` found, as JSON."""
    found = verify_run(require_run(open_store(store), run))
    return {"sound": found.sound, **asdict(found)}


def render_verification(report: dict[str, Any]) -> None:
    """The same for people."""
    size = report["bytes"] / 2**20
    console = Console(soft_wrap=True, highlight=False)
    if report["sound"]:
        console.print(
            f"Run {report['run']}: {report['iterations']} iterations, {report['files']} files, {size:.1f} MiB: sound."
        )
        for left_out in report["not_included"]:
            console.print(f"  not included: {left_out}", markup=False)
        return
    last = report["usable_through"]
    usable = f"Usable through iteration {last}." if last >= 0 else "No iteration is usable."
    console.print(f"Run {report['run']}: {len(report['faults'])} faults. {usable}")
    for fault in report["faults"]:
        console.print(f"  iteration {fault['iteration']}, {fault['where']}: {fault['what']}", markup=False)
