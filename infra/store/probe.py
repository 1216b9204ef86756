"""Can a store be committed to? Asked once, before work starts."""

import errno
import secrets

from infra.store.disk import TEMPORARY
from infra.store.files import StoreFiles
from mgrpo_core.errors import StoreError, StoreNotWritableError


def probe(files: StoreFiles, folder: str) -> None:
    """Create a small file, once, and remove it: what every commit relies on.

    Raises:
        StoreNotWritableError: the store cannot be written.
        StoreError: a second creation succeeded, so that two writers could both commit an iteration; or no answer.
    """
    path = f"{folder}/{TEMPORARY}probe-{secrets.token_hex(8)}"
    try:
        files.create(path, b"mgrpo")
        try:
            files.create(path, b"again")
        except FileExistsError:
            return
        finally:
            files.remove(path)
    except StoreError:
        raise
    except Exception as error:  # object stores have errors of their own: no credentials, no bucket, no route
        if isinstance(error, OSError) and error.errno == errno.ENOSYS:
            raise _unconditional(files, "refuses") from error
        raise StoreNotWritableError(
            f"{files.uri(folder)}: cannot be written ({type(error).__name__}: {error}). Check the address and the "
            "credentials, or give another --store."
        ) from error
    raise _unconditional(files, "ignores")


def _unconditional(files: StoreFiles, does: str) -> StoreError:
    return StoreError(
        f"{files.url}: this server {does} conditional writes (If-None-Match), so that two writers could both commit an "
        "iteration. Either\n"
        "  1. use one that honours them (AWS S3, MinIO, SeaweedFS), or a local folder; or\n"
        "  2. promise that one process at a time trains in this store: execution.single_writer: true."
    )
