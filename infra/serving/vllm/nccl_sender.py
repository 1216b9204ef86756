"""Sends a folder's weights to vLLM servers by NCCL. Runs in vLLM's own Python, by path, and imports nothing of ours.

vLLM's trainer side does the work: it speaks the servers' rendezvous, cuts the weights into the servers' pieces and
broadcasts them. What it wants of the servers over HTTP goes out as a line of JSON and waits for one that comes in: the
process at the other end asks the servers, knows their names, and says what went wrong.

Lines out: {"step": "ready"}, then {"step": ROUTE, "body": …} a request, then {"step": "sent"}; or, at any point,
{"refuses": why} where no second attempt can help, {"fails": why} where one may.
Lines in: the job after "ready", {} after each request.
"""

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from safetensors import safe_open


class Declared(NamedTuple):
    """One weight, before it is sent; vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FolderWeights:
    """Every weight of a folder's safetensors files, as they are in it; vLLM's `WeightSource`.

    All files and all names, in one order: what vLLM reads where it is given the folder.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._files = sorted(folder.glob("*.safetensors"))
        self._device = device

    def metadata(self) -> list[Declared]:
        """What iteration will yield. Files are mapped into memory, not read."""
        return [Declared(name, weight.dtype, tuple(weight.shape)) for name, weight in self._mapped()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._mapped():
            yield name, weight.to(self._device)

    def _mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  # no mapping
                    yield name, weights.get_tensor(name)


class Wire:
    """Lines of JSON to and from the process that started this one. All else that is printed goes to stderr."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # vLLM logs to stdout, and so does NCCL
        self._lock = threading.Lock()

    def say(self, **what: Any) -> None:
        with self._lock:
            self._out.write(json.dumps(what) + "\n")
            self._out.flush()

    def ask(self, step: str, body: Any = None) -> Any:
        """Say it, and wait for the line that answers."""
        self.say(step=step, body=body)
        answer = sys.stdin.readline()
        if not answer:
            raise EOFError(f"nobody answered {step!r}: the process that started this one hung up.")
        return json.loads(answer)


class Servers:
    """vLLM's `VLLMWeightSyncClient`: four requests, which the other end sends to every server."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wire.ask("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._wire.ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._wire.ask("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002  # labelled later
        self._wire.ask("finish_weight_update")


def refusal() -> str | None:
    """Why nothing can be sent from here, None where it can."""
    if not torch.cuda.is_available():
        return f"{sys.executable} sees no CUDA GPU (torch {torch.__version__})"
    try:
        import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"the vLLM of {sys.executable} has no weight transfer as vLLM 0.32 has it ({error})"
    return None


def send(wire: Wire) -> None:
    """One transfer, from rendezvous to the end."""
    from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLTrainerInitInfo,
    )

    job = wire.ask("ready")
    place = NCCLTrainerInitInfo(
        rank=0,
        master_address=job["address"],
        master_port=free_port(job["address"]),
        world_size=job["world_size"],
    )
    engine = WeightTransferTrainerFactory.trainer_init(
        place, client=Servers(wire), source=FolderWeights(Path(job["folder"]), gpu())
    )
    engine.send_weights()
    wire.say(step="sent")
    engine.shutdown()


def gpu() -> torch.device:
    """The first that CUDA_VISIBLE_DEVICES leaves, which is where vLLM's trainer side has its end."""
    return torch.device("cuda", torch.cuda.current_device())


def free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind((address, 0))
        return int(one.getsockname()[1])


def main() -> None:
    """Until the weights are sent, or cannot be."""
    wire = Wire()
    why = refusal()
    if why is not None:
        wire.say(refuses=why)
        sys.exit(1)
    try:
        send(wire)
    except Exception as error:  # whatever it is, the other end is told
        traceback.print_exc()
        wire.say(fails=f"{type(error).__name__}: {error}")
        os._exit(1)  # not sys.exit: that waits for the thread whose request nobody will answer


if __name__ == "__main__":
    main()
