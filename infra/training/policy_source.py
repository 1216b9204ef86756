"""Where a policy's version 0 comes from."""

from pathlib import Path

from infra.quickstart.builtin import builtin_policy
from mgrpo_core.errors import ConfigError

_BUILTIN = "builtin:"


def initial_folder(init: str) -> Path:
    """The folder that a policy's `init` names: `builtin:quickstart/main`, or a path.

    Raises: ConfigError if there is none.
    """
    if init.startswith(_BUILTIN):
        return builtin_policy(init)
    folder = Path(init).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"init {init!r}: no such folder. Give a Hugging Face folder (config.json, safetensors, tokenizer.json), "
            "or builtin:quickstart/main."
        )
    return folder
