"""Where an export goes to or comes from: a folder or file, here or on any fsspec file system."""

from infra.store.files import StoreFiles
from mgrpo_core.errors import ConfigError


def folder_and_name(address: str) -> tuple[StoreFiles, str]:
    """The folder of a file's address, and its name there.

    Raises: ConfigError if the address names no file, StoreError if no file system answers to it, or if it holds
        credentials.
    """
    folder, slash, name = address.rpartition("/")
    if not name or (slash and (not folder or folder.endswith("/")) and "://" in address):
        raise ConfigError(f"{address!r} names no file. Give a path or URL with a file's name at its end.")
    return StoreFiles(folder or ("/" if slash else ".")), name


def require_free(files: StoreFiles, name: str) -> None:
    """Raises: ConfigError if the name is taken."""
    if files.exists(name):
        raise ConfigError(f"{files.uri(name)}: is there already, and is not replaced. Give another name, or remove it.")
