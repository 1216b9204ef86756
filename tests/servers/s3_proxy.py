"""Stands between a client and an S3 server, counts requests, and fails as networks and busy servers do."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}: as told by the test</Message></Error>'
_HOP = ("connection", "transfer-encoding", "content-length")


class Fault(Enum):
    """What befalls a request."""

    REFUSED = auto()  # the connection ends, the server never heard of it
    LOST = auto()  # the server did it; the answer never came back
    CUT = auto()  # half of the answer's body came back
    INTERNAL_ERROR = 500
    BAD_GATEWAY = 502
    SLOW_DOWN = 503
    TOO_MANY_REQUESTS = 429
    CONDITIONAL_REQUEST_CONFLICT = 409
    NOT_IMPLEMENTED = 501
    NO_SUCH_UPLOAD = 404


@dataclass
class S3Proxy:
    """The proxy, told what to do.

    Attributes:
        endpoint: where it listens.
        faults: the next matching requests get these, one each; then all is well.
        matches: which requests faults befall, by method and path.
        drops: headers that never reach the server, in lower case. Only before a server that checks no signatures.
        requests: method and path of all that came.
    """

    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    matches: Callable[[str, str], bool] = lambda method, path: True
    drops: tuple[str, ...] = ()
    requests: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
        if not self.faults or not self.matches(method, path):
            return None
        with self._lock:
            return self.faults.pop(0) if self.faults else None


@contextmanager
def s3_proxy(server: str) -> Iterator[S3Proxy]:
    """A proxy before the server at this address."""
    proxy, upstream = S3Proxy(), urlsplit(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:  # the client was killed
                self.close_connection = True
                return
            fault = proxy.fault_of(self.command, self.path)
            if fault is Fault.REFUSED:
                self.close_connection = True
                return
            if fault is not None and isinstance(fault.value, int) and fault.value >= 400:
                code = "".join(part.capitalize() for part in fault.name.split("_"))
                self._answer(fault.value, {}, b"" if self.command == "HEAD" else _ERROR.format(code=code).encode())
                return
            status, headers, data = self._forward(body)
            if fault is Fault.LOST:
                self.close_connection = True
                return
            self._answer(status, headers, data, cut=fault is Fault.CUT)

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            assert upstream.hostname
            connection = http.client.HTTPConnection(upstream.hostname, upstream.port, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in proxy.drops}
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                found = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
                if self.command == "HEAD":
                    found["Content-Length"] = answer.getheader("Content-Length") or "0"
                return answer.status, found, answer.read()
            finally:
                connection.close()

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        proxy.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), name="s3-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()
            thread.join()
