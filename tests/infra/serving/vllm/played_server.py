"""An HTTP server that plays vLLM, honestly until it is told to misbehave."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from infra.serving.vllm.probe import TEMPERATURE, Probe

GENERATE = "/inference/v1/generate"
SAYS = [11, 12, 2]
INIT, START, UPDATE, FINISH, RELEASE = TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
)
CONTEXT = 384

Spoils = Callable[[str, Any], Any]
"""Gets a route and the honest answer, returns what is sent: JSON, a status, bytes, or HANG_UP."""

HANG_UP = object()


class PlayedServer:
    """Policy `main` with the weights that a probe is of, on a free port.

    Attributes:
        name: under which it serves.
        spoil: what it does instead of answering honestly.
        asked: routes, in their order.
        headers: of the last request.
        backend: by which it takes weights from a trainer's GPU, None = it does not.
        workers: that hold its weights.
    """

    def __init__(self, probe: Probe, text_ids: list[int]) -> None:
        self.spoil: Spoils | None = None
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.headers: dict[str, str] = {}
        self.name = "main"
        self.label = "default"
        self.context = CONTEXT
        self.backend: str | None = None
        self.workers = 1
        self.probe = probe
        self._text_ids = text_ids
        self._port = 0
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        player = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet: the second would wait for the first one's acknowledgement

            def do_GET(self) -> None:
                player._play(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256  # of 5, the system drops connections that come together, for a second

        self._http = Server(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening; what is connected is hung up on."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def count(self, route: str) -> int:
        return self.asked.count(route)

    def _play(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        if self._http is None:
            request.close_connection = True
            return
        self.asked.append(request.path)
        self.bodies.append(body)
        self.headers = dict(request.headers)
        answer = self._honest(request.path, body)
        if self.spoil is not None:
            answer = self.spoil(request.path, answer)
        if answer is HANG_UP:
            request.close_connection = True
            return
        status = answer if isinstance(answer, int) else 200
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _honest(self, route: str, body: Any) -> Any:
        match route:
            case "/v1/models":
                return {"data": [{"id": self.name, "max_model_len": self.context}]}
            case "/tokenize":
                return {"tokens": self._text_ids}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/collective_rpc":
                return {"results": [None]}
            case "/server_info?config_format=json":
                return {"vllm_config": {"weight_transfer_config": self.backend and {"backend": self.backend}}}
            case "/get_world_size":
                return {"world_size": self.workers}
            case "/pause" | "/resume":
                return {"status": route[1:]}
            case _ if route in TRANSFER:
                return {"message": "done"}
            case _:
                return self._completion(body)

    def _completion(self, body: Any) -> Any:
        ids = body["token_ids"]
        if len(ids) in self.probe.cuts and ids == self.probe.prompt_ids[: len(ids)].tolist():
            row = self.probe.cuts.index(len(ids))
            tokens = [int(self.probe.logits_NV[row].argmax())]
            logprobs = [float(torch.log_softmax(self.probe.logits_NV[row] / TEMPERATURE, -1)[tokens[0]])]
        else:
            tokens, logprobs = SAYS, np.linspace(-0.3, -0.1, len(SAYS)).tolist()
        content = [{"token_id": one, "logprob": value} for one, value in zip(tokens, logprobs, strict=True)]
        choice = {
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
        }
        return {"choices": [choice]}
