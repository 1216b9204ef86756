"""What a file system says when it cannot be written, in words that help."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from mgrpo_core.errors import StoreError, StoreNotWritableError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@contextmanager
def as_store_errors(uri: str) -> Iterator[None]:
    """No space and no right to write are StoreNotWritableError; every other error rises as it is.

    Args:
        uri: what is being written, for the message.
    """
    try:
        yield
    except (FileExistsError, StoreError):
        raise
    except OSError as error:
        if error.errno in _NO_SPACE:
            advice = "No space left. Nothing of this file was kept; free some and start again: it resumes."
        elif error.errno in _NO_RIGHT or isinstance(error, PermissionError):
            advice = "It cannot be written. Give another --store, or the right to write there."
        else:
            raise
        raise StoreNotWritableError(f"{uri}: {error.strerror or error}. {advice}") from error
