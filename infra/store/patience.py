"""How long an object store that gives no answer is asked again, and what counts as no answer."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from botocore.exceptions import ClientError, HTTPClientError, SSLError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from mgrpo_core.errors import StoreError

_FIRST_DELAY_S, _GROWTH, _LONGEST_DELAY_S = 0.2, 1.7, 10.0
_STATUS = (408, 425, 429, 500, 502, 503, 504)
_CODES = (  # said with other statuses by some servers
    "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestLimitExceeded", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
)  # fmt: skip
_NO_ANSWER = (NoConnection, HTTPClientError, ResponseParserError, aiohttp.ClientError, OSError, asyncio.TimeoutError)

_log = logging.getLogger("mgrpo.store")
T = TypeVar("T")


class Patience:
    """Repeats requests of one store until it answers. Says once that it waits, and once that it need not any longer.

    botocore's own retries give no such promise: their delays are random from 0, and a quota that all requests of a
    client share ends them after about a hundred failures, which eight parallel uploads use up in seconds.
    """

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._waiting = False

    async def call(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request that may be sent again.

        Args:
            what: address, for messages.
            request: sends it once.

        Raises: StoreError when the store gave no answer for `total_s`. Any other answer rises as it is.
        """
        first_failure: float | None = None
        delay = _FIRST_DELAY_S
        while True:
            try:
                answer = await request()
            except Exception as error:
                if not is_transient(error):
                    raise
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                left = self._total_s - (now - first_failure)
                if left <= 0:
                    raise StoreError(
                        f"{what}: no answer for {now - first_failure:.0f} s ({said(error)}). What is committed stands. "
                        "Start the same command again when the store is back: it resumes."
                    ) from error
                self._say_that_it_waits(what, error)
                # At random, so that hosts that failed together do not come back together.
                await asyncio.sleep(min(left, delay * random.uniform(0.5, 1)))  # noqa: S311
                delay = min(delay * _GROWTH, _LONGEST_DELAY_S)
            else:
                if self._waiting:
                    self._waiting = False
                    _log.warning("%s: answers again.", what)
                return answer

    def _say_that_it_waits(self, what: str, error: Exception) -> None:
        if not self._waiting:
            self._waiting = True
            _log.warning("%s: no answer (%s). Asking again for up to %.0f s.", what, said(error), self._total_s)


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later: 5xx, throttled, refused, cut off. Not a wrong key or certificate."""
    if isinstance(error, ClientError):
        response = error.response
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _STATUS or response.get("Error", {}).get("Code") in _CODES
    return isinstance(error, _NO_ANSWER) and not isinstance(error, SSLError | FileNotFoundError | PermissionError)


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"
