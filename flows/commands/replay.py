"""Recompute an iteration, or try it with other settings."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.endings import errors_to_exit_codes, print_json
from flows.commands.options import DEFAULT_STORE, AsJson, RunName, Store
from infra.replay.verdicts import Through
from mgrpo_core.errors import ConfigError


def replay(
    run: RunName,
    iteration: Annotated[int, typer.Argument(min=0, help="Number of a committed iteration.")],
    store: Store = DEFAULT_STORE,
    through: Annotated[
        Through, typer.Option("--through", help="The last stage; `advantages` needs no model.")
    ] = "update",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--set", help="What if: key=value, e.g. --set alignment.d=[2,4]; may be repeated, lists a grid."),
    ] = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", help="The same, as key=a,b.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="File for a PNG of what would change.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute an iteration from the store and compare, to the bit. Exit code 1 if anything differs.

    With --set or --grid: what it would have been under other settings, beside what it was. Nothing is written into the
    run.
    """
    with errors_to_exit_codes(interrupted="Interrupted. A replay changes nothing."):
        settings = [*(what_if or []), *(_as_list(one) for one in grid or [])]
        if settings:
            from infra.replay.what_if import what_if_stored

            found = what_if_stored(store, run, iteration, settings, through)
            if picture is not None:
                from infra.replay.what_if_picture import what_if_png

                try:
                    picture.write_bytes(what_if_png(found))
                except OSError as error:
                    raise ConfigError(f"--picture {picture}: cannot be written ({error}). Give another file.") from None
            if as_json:
                print_json(found.to_json())
            else:
                from infra.replay.render_what_if import render_what_if

                render_what_if(found)
            return
        if picture is not None:
            raise ConfigError("--picture: there is nothing to draw without --set or --grid. Give one.")
        from infra.replay.iteration import replay_stored
        from infra.replay.render import render_replay

        report = replay_stored(store, run, iteration, through)
        if as_json:
            print_json(report.to_json())
        else:
            render_replay(report)
        if not report.equal:
            raise typer.Exit(1)


def _as_list(setting: str) -> str:
    """`key=a,b` as `key=[a, b]`."""
    key, equals, values = setting.partition("=")
    return f"{key}{equals}[{values}]" if equals else setting
