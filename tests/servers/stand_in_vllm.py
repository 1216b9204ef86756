"""A Python that plays one with vLLM in it: notes how it is started and what it is told, and ends once it has a label.

As a program: `stand_in_vllm.py NOTES`, then what vLLM's Python is given.
"""

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Told:
    """Options of the server's command line, and what was posted to it, in order."""

    options: Mapping[str, str]
    posts: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StandIn:
    """Plays for `mgrpo serve --python`."""

    python: Path
    notes: Path

    def told(self) -> Told:
        """At its last start."""
        command, *posts = map(json.loads, self.notes.read_text(encoding="utf-8").splitlines())
        return Told(dict(word.partition("=")[::2] for word in command), tuple(map(tuple, posts)))


def save_stand_in(folder: Path) -> StandIn:
    made = StandIn(folder / "python", folder / "notes")
    made.python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {made.notes} "$@"\n', encoding="utf-8")
    made.python.chmod(0o755)
    return made


def play(notes: Path, command: list[str]) -> None:
    """Answer {} to everything."""
    note(notes, "w", command)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            note(notes, "a", [self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))])
            self.do_GET()
            if self.path == "/update_weight_version":
                threading.Thread(target=server.shutdown).start()

    port = next(int(word.partition("=")[2]) for word in command if word.startswith("--port="))
    server = HTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever(0.02)


def note(notes: Path, mode: str, what: object) -> None:
    with notes.open(mode, encoding="utf-8") as file:
        print(json.dumps(what), file=file)


if __name__ == "__main__":
    if "-c" in sys.argv:  # which vLLM?
        print("vllm 0.32.0")
    else:
        play(Path(sys.argv[1]), sys.argv[2:])
