"""Plays `nccl_sender` without a GPU, vLLM or weights: the same lines in and out, in the order of vLLM's trainer side.

As vLLM's Python it is `python -I …/nccl_sender.py`, and starts in no time.
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from infra.serving.vllm.build import VllmBuild

_PLAY = """
    import json, os, pathlib, sys, time
    here = pathlib.Path(__file__).parent
    how = (here / "how").read_text()

    def say(**what):
        print(json.dumps(what), flush=True)

    def ask(step, body=None):
        if how == f"dies at {step}":
            say(step=step, body=body)
            time.sleep(0.3)  # the servers have begun
            print("ncclInvalidUsage: Duplicate GPU detected", file=sys.stderr)
            os._exit(6)
        say(step=step, body=body)
        answer = sys.stdin.readline()
        if not answer:
            os._exit(7)
        return json.loads(answer)

    with (here / "pids").open("a") as pids:
        print(os.getpid(), file=pids)
    time.sleep(0.3)  # who comes meanwhile goes along
    if how == "refuses":
        say(refuses="python sees no CUDA GPU (torch 2.13.0+cpu)")
        sys.exit(1)
    if how == "deaf":
        print("importing", file=sys.stderr, flush=True)
        time.sleep(600)
    job = ask("ready")
    (here / "job").write_text(json.dumps(job))
    place = {"master_address": job["address"], "master_port": 29555, "world_size": job["world_size"], "packed": True}
    ask("init_weight_transfer_engine", {"init_info": {"rank_offset": 1, **place}})
    ask("start_weight_update")
    weight = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[3, 2]]}
    ask("update_weights", {"update_info": weight})
    ask("finish_weight_update")
    say(step="sent")
"""


class PlayedSender:
    """An environment that seems to hold vLLM.

    Attributes:
        build: to start senders with.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "play.py").write_text(textwrap.dedent(_PLAY), encoding="utf-8")
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -I {folder}/play.py "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        self.build = VllmBuild(python, "0.32.0")
        self.do("send")

    def do(self, how: str) -> None:
        """`send`, `refuses`, `deaf`, or `dies at STEP`."""
        (self._folder / "how").write_text(how, encoding="utf-8")

    @property
    def job(self) -> dict[str, Any]:
        """What the last one was told to do."""
        return json.loads((self._folder / "job").read_text(encoding="utf-8"))

    @property
    def pids(self) -> list[int]:
        """Of all that came to play."""
        path = self._folder / "pids"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []
