"""S3 through s3fs: every request under one patience, and a conditional create that knows its own bytes again."""

import math
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from botocore.exceptions import ClientError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from infra.store.patience import Patience

PART_BYTES = 16 << 20
"""Files of two parts or more are uploaded in parts, side by side; others in one request."""

_MOST_PARTS = 10_000
_MOST_REMOVED = 1_000
_TIMEOUTS_S = {"connect_timeout": 5, "read_timeout": 30}
_MARK = "mgrpo-written-by"
_REFUSED, _NO_SUCH_RANGE, _NOT_IMPLEMENTED = 412, 416, 501


class Look(NamedTuple):
    """What an S3 server knows of a file. `mark` is None where somebody else wrote it, or in parts."""

    size: int
    etag: str
    modified: str
    mark: str | None


class PatientS3(S3FileSystem):
    """s3fs, except for what happens when the server fails.

    Bodies are read within the request that asks for them, so that an answer cut short is asked for again, too.
    """

    def __init__(self, *args: Any, patience_s: float, **kwargs: Any) -> None:
        config = {**_TIMEOUTS_S, "retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
        super().__init__(*args, config_kwargs={**config, **kwargs.pop("config_kwargs", {})}, **kwargs)
        self._patience = Patience(patience_s)

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        try:
            return await self._ask(method, *akwarglist, **kwargs)
        except ClientError as error:
            raise translate_boto_error(error) from error

    call_s3 = sync_wrapper(_call_s3)

    async def _ask(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        await self.set_session()
        send = getattr(await self.get_s3(kwargs.get("Bucket")), method)
        arguments = self._get_s3_method_kwargs(send, *akwarglist, **kwargs)

        async def request() -> Any:
            answer = await send(**arguments)
            if method == "get_object":
                async with answer["Body"] as body:
                    answer["Body"] = _Body(await body.read())
            return answer

        where = "/".join(str(kwargs[name]) for name in ("Bucket", "Key") if name in kwargs)
        return await self._patience.call(f"s3://{where}", request)

    async def _cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        # One request: more than one reader would first have to ask for the size.
        return await super()._cat_file(path, *args, **{"max_concurrency": 1, **kwargs})

    async def _get_file(self, rpath: str, lpath: str, *_args: Any, **_kwargs: Any) -> None:
        # Ranges only: a body is held in memory.
        size = (await self._info(rpath))["size"]
        bucket, key, _ = self.split_path(rpath)
        await self._download_file_part_concurrent(bucket, key, lpath, size, PART_BYTES)

    async def _look(self, path: str) -> Look | None:
        """What the server knows of a file, in one request; None if there is none."""
        bucket, key, _ = self.split_path(path)
        try:
            answer = await self._call_s3("head_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return None
        mark = answer.get("Metadata", {}).get(_MARK)
        return Look(answer["ContentLength"], answer["ETag"], str(answer.get("LastModified")), mark)

    look = sync_wrapper(_look)

    def read_small(self, path: str, limit: int) -> bytes | None:
        """A file of at most `limit` bytes, in one request; None if it is larger.

        Raises: FileNotFoundError.
        """
        bucket, key, _ = self.split_path(path)
        try:
            answer: Any = self.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes=0-{limit - 1}")
        except OSError as error:
            cause = error.__cause__
            if isinstance(cause, ClientError) and _status(cause) == _NO_SUCH_RANGE:
                return b""  # an empty file has no first byte
            raise
        size = int(answer.get("ContentRange", "/0").rpartition("/")[2])
        return None if size > limit else answer["Body"].data

    def first_below(self, path: str) -> str | None:
        """A file below a folder, None if there is none. An empty folder, which some servers have, is none."""
        bucket, key, _ = self.split_path(path)
        found: Any = self.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{key}/" if key else "", MaxKeys=1)
        return next((one["Key"] for one in found.get("Contents", [])), None)

    def remove_objects(self, paths: list[str]) -> None:
        """Remove files, a thousand a request. Not `rm`, which takes brackets for patterns and tells of no refusal.

        Raises: PermissionError naming the first that the server keeps.
        """
        keys = [self.split_path(path)[:2] for path in paths]
        for start in range(0, len(keys), _MOST_REMOVED):
            batch = keys[start : start + _MOST_REMOVED]
            objects = {"Objects": [{"Key": key} for _, key in batch], "Quiet": True}
            answer: Any = self.call_s3("delete_objects", Bucket=batch[0][0], Delete=objects)
            for kept in answer.get("Errors", []):
                raise PermissionError(f"s3://{batch[0][0]}/{kept['Key']}: not removed ({kept.get('Message')}).")

    def send(self, local: Path, path: str) -> str:
        """Upload a file, whole or not at all; return its ETag."""
        size = local.stat().st_size
        if size < 2 * PART_BYTES:
            answer: Any = self.pipe_file(path, local.read_bytes(), Metadata=_new_mark())
            return answer["ETag"]
        part = max(PART_BYTES, math.ceil(size / _MOST_PARTS))
        try:
            self.put_file(str(local), path, chunksize=part)
        except FileNotFoundError:
            # NoSuchUpload: the answer to its completion was lost, and the completion sent again; or no such bucket.
            self.put_file(str(local), path, chunksize=part)
        found: Any = self.look(path)
        return found.etag

    async def _create_object(self, path: str, data: bytes, *, look_first: bool) -> None:
        """Write an object that must not exist.

        A success whose answer was lost is refused when it is sent again, by us or, unseen, by aiohttp, which repeats a
        PUT on a connection that it had kept. So each call leaves a mark of its own on the object, and knows it by that.

        Args:
            path: bucket and key.
            data: whole content.
            look_first: for servers that ignore or refuse the condition; two writers could both succeed there.

        Raises: FileExistsError if somebody else wrote it.
        """
        bucket, key, _ = self.split_path(path)
        if look_first and await self._look(path) is not None:
            raise FileExistsError(path)
        await self.set_session()
        client: Any = await self.get_s3(bucket)
        send = client.put_object
        mark = _new_mark()
        what = {"Bucket": bucket, "Key": key, "Body": data, "IfNoneMatch": "*", "Metadata": mark}
        arguments = self._get_s3_method_kwargs(send, **what)
        try:
            await self._patience.call(f"s3://{path}", lambda: send(**arguments))
        except ClientError as error:
            if _status(error) == _NOT_IMPLEMENTED and look_first:
                await self._pipe_file(path, data)
            elif _status(error) != _REFUSED:
                raise translate_boto_error(error) from error
            elif not await self._wrote(path, data, mark[_MARK]):
                raise FileExistsError(path) from error

    async def _wrote(self, path: str, data: bytes, mark: str) -> bool:
        """Whether what is there was written by the call with this mark."""
        there = await self._look(path)
        if there is None:  # gone again
            return False
        # A server that keeps no metadata: a manifest's content names its writer, and other equal records are as good.
        return there.mark == mark if there.mark else await self._cat_file(path) == data

    create_object = sync_wrapper(_create_object)


def _new_mark() -> dict[str, str]:
    """Metadata that tells one write from every other, of the same content in the same second, too."""
    return {_MARK: secrets.token_hex(16)}


def _status(error: ClientError) -> int | None:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")


class _Body:
    """The body of an answer, read already; what s3fs asks of a stream."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read(self) -> bytes:
        return self.data

    def close(self) -> None:
        """Nothing is open."""
