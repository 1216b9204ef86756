"""Policies that mgrpo ships."""

from pathlib import Path

from mgrpo_core.errors import ConfigError

_PREFIX = "builtin:quickstart/"
POLICIES = Path(__file__).parent / "policies"


def builtin_policy(name: str) -> Path:
    """The folder of `builtin:quickstart/main` or `builtin:quickstart/sub`.

    Raises: ConfigError for any other name.
    """
    there = sorted(folder.name for folder in POLICIES.iterdir() if folder.is_dir()) if POLICIES.is_dir() else []
    policy = name.removeprefix(_PREFIX)
    if not name.startswith(_PREFIX) or policy not in there:
        known = ", ".join(_PREFIX + one for one in there) or "none"
        raise ConfigError(f"init {name!r}: mgrpo ships no such policy. Known: {known}; or give a folder.")
    return POLICIES / policy
