"""A store's address: the file system that answers to it. It holds no secret, so that it may be logged and stored."""

import os
import re
from typing import Any

import fsspec

from mgrpo_core.errors import StoreError

_S3 = ("s3", "s3a")
# A secret key may hold slashes: `s3://key:se/cret@bucket` has no @ before its first slash. ARNs have colons, too.
_CREDENTIALS = re.compile(r"://[^/@]*:[^/@]*@|(?:^|:)s3a?://[^/@]*@|(?:^|:)s3a?://(?!arn:)[^/@:]*:[^@]*@")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def file_system(url: str, patience_s: float) -> tuple[Any, str]:
    """The file system of a folder or fsspec URL, and its name for the store's root.

    Raises: StoreError if none answers to it, or if the URL or the S3 endpoint's holds credentials.
    """
    if _CREDENTIALS.search(url):
        raise _told_too_much("the store's URL")
    # Never a cached instance: its listing cache would hide what other processes write.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    try:
        if not is_s3(url):
            return fsspec.core.url_to_fs(url, **options)
        for name in _ENDPOINTS:
            if "@" in os.environ.get(name, ""):
                raise _told_too_much(f"the environment's {name}")
        from infra.store.s3 import PatientS3  # a second to import, and no part of a local store

        return PatientS3(patience_s=patience_s, **options), str(PatientS3._strip_protocol(url))
    except (ValueError, ImportError, TypeError) as error:
        raise StoreError(f"store {url!r}: no file system for it ({error}). Give a folder or an fsspec URL.") from error


def is_s3(url: str) -> bool:
    """Whether the URL is of an S3 server."""
    return fsspec.core.split_protocol(url)[0] in _S3


def _told_too_much(what: str) -> StoreError:
    return StoreError(  # without the URL: messages are logged
        f"{what} holds credentials, and would show them in logs, manifests and process lists. Leave them out, as in "
        "s3://bucket/prefix, and give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in ~/.aws/credentials, or "
        "as a role of the machine."
    )
