"""Arguments and options that several commands share."""

from typing import Annotated

import typer

from flows.load_config import preset_names

DEFAULT_STORE = "mgrpo-store"

Source = Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")]
RunName = Annotated[str, typer.Argument(help="Name of the run.")]
Store = Annotated[
    str, typer.Option("--store", envvar="MGRPO_STORE", help="Where runs are kept: a folder or an fsspec URL.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, e.g. --set loss.clip_low=0.1; may be repeated.")
]
AcceptConfigChange = Annotated[
    bool, typer.Option("--accept-config-change", help="Continue a run although its config was another so far.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
