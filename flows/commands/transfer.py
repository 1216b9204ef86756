"""Take a run, or iterations of it, to another place: a folder, an archive, or plain text."""

from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes, print_json
from flows.commands.options import DEFAULT_STORE, AsJson, RunName, Store
from mgrpo_core.errors import ConfigError

_EXPORT_STOPPED = "Interrupted. An archive is there whole or not at all; the same command completes a folder."
_IMPORT_STOPPED = "Interrupted. No run has appeared; the same command goes on from here."


def export(
    run: RunName,
    target: Annotated[
        str | None,
        typer.Argument(help="A folder, or an archive: FILE.tar.zst or FILE.tar. A path or an fsspec URL."),
    ] = None,
    store: Store = DEFAULT_STORE,
    iteration: Annotated[
        list[int] | None, typer.Option("--iteration", min=0, help="Only this iteration; may be repeated.")
    ] = None,
    policies: Annotated[
        bool,
        typer.Option("--policies/--no-policies", help="With the policy versions that replaying updates needs."),
    ] = True,
    jsonl: Annotated[
        str | None, typer.Option("--jsonl", help="Write plain text too: a JSON object a trajectory and line.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="In plain text: token ids, mask and log-probs as well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export a run, or some of its iterations, with all that verifying and replaying them needs."""
    with errors_to_exit_codes(interrupted=_EXPORT_STOPPED, damaged=1):
        if target is None and jsonl is None:
            raise ConfigError("nothing to export to: give a TARGET, or --jsonl FILE.")
        if tokens and jsonl is None:
            raise ConfigError("--tokens: is for plain text. Give --jsonl FILE; other exports have all tokens.")
        done: dict[str, object] = {"run": run}
        if target is not None:
            from infra.portable.exporting import export_stored

            exported = export_stored(store, run, target, iterations=iteration, policies=policies)
            record = exported.record
            done |= {
                "target": target,
                "iterations": list(record.iterations),
                "policies": record.policies,
                "files": len(record.files),
                "bytes": record.total_bytes,
                "left_out": list(record.left_out()),
            }
        if jsonl is not None:
            from infra.portable.jsonl import export_jsonl

            done |= {"jsonl": jsonl, "lines": export_jsonl(store, run, jsonl, iterations=iteration, tokens=tokens)}
        if as_json:
            print_json(done)
            return
        if target is not None:
            _say_exported(done)
        if jsonl is not None:
            typer.echo(f"{jsonl}: {done['lines']} trajectories, one a line.")


def import_run(
    source: Annotated[str, typer.Argument(help="An archive or folder that `mgrpo export` made.")],
    store: Store = DEFAULT_STORE,
    run: Annotated[
        str | None, typer.Option("--run", help="Which run, where a folder holds exports of several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import an export: every byte and link is verified before anything of it is visible."""
    with errors_to_exit_codes(interrupted=_IMPORT_STOPPED, damaged=1):
        from infra.portable.importing import import_export
        from infra.store.export_record import named_iterations

        done = import_export(source, store, run=run)
        record = done.record
        if as_json:
            print_json(
                {
                    "run": record.run,
                    "uri": done.uri,
                    "iterations": list(record.iterations),
                    "policies": record.policies,
                    "whole": record.whole,
                    "files": done.verification.files,
                    "bytes": done.verification.bytes,
                    "left_out": list(record.left_out()),
                }
            )
            return
        what = "whole, and can be continued" if record.whole else "in part: it can be read and replayed, not continued"
        typer.echo(f"{done.uri}: iterations {named_iterations(record.iterations)}, verified. The run is here {what}.")
        for left_out in record.left_out():
            typer.echo(f"  not included: {left_out}")


def _say_exported(done: dict[str, object]) -> None:
    from infra.store.export_record import named_iterations

    iterations, size = done["iterations"], done["bytes"]
    assert isinstance(iterations, list)
    assert isinstance(size, int)
    typer.echo(
        f"{done['target']}: run {done['run']}, iterations {named_iterations(iterations)}, {done['files']} files, "
        f"{size / 2**20:.1f} MiB."
    )
    left_out = done["left_out"]
    assert isinstance(left_out, list)
    for one in left_out:
        typer.echo(f"  not included: {one}")
