"""Small JSON requests to services on this machine, past any proxy that the environment names."""

import json
import urllib.request
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_TIMEOUT_S = 5.0


def answers(url: str) -> bool:
    """Whether `url` gives status 2xx. Raises OSError if it cannot be reached or gives another."""
    with _DIRECT.open(url, timeout=_TIMEOUT_S) as response:
        return 200 <= response.status < 300


def post_json(url: str, body: object) -> Any:
    """Post `body`, return the answer's JSON. Raises OSError as `answers` does."""
    request = urllib.request.Request(  # noqa: S310  # http, by our own words
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with _DIRECT.open(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)
