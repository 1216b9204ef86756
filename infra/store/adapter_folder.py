"""A version that is an adapter, as a local folder: its own files, and `base`, the folder of the version it lies on.

The files are those of peft; that there is one is how every reader of a version tells an adapter from whole weights.
"""

import json
from collections.abc import Iterable
from pathlib import Path

BASE = "base"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def adapter_rank(folder: Path) -> int | None:
    """None where there is no adapter in the folder."""
    return json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"] if is_adapter(folder) else None


def whole_folder(folder: Path) -> Path:
    """Where a version's architecture, tokenizer and template are: an adapter's are those of its base."""
    return folder / BASE if is_adapter(folder) else folder


def lay_on_base(target: Path, own: Path, names: Iterable[str], base: Path) -> None:
    """Fill an empty folder with links to an adapter's files and to its base."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to((own / name).absolute())
    link_base(target, base)


def link_base(adapter: Path, base: Path) -> None:
    """Lay an adapter's own files, in a folder that may be written, on the folder of its base."""
    (adapter / BASE).symlink_to(base.absolute(), target_is_directory=True)
