"""vLLM's own routes for new weights, with workers on the CPU behind them. Run by vLLM's Python: FOLDER SERVER ….

A SERVER is JSON: port, name, workers, flags of vLLM's server; `broken` is one that fails at the rendezvous.

Bodies are read by vLLM's dataclasses, and the rendezvous is vLLM's. NCCL needs GPUs: weights come through the store
of the rendezvous instead, and are written to FOLDER with the ranks that received them.
"""

import json
import sys
from asyncio import gather, run, sleep, to_thread
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, stateless_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.rl.online.api_router import router
from vllm.entrypoints.serve.dev.server_info.api_router import router as info_router
from vllm.utils.argparse_utils import FlexibleArgumentParser


class Workers:
    """vLLM's `EngineClient` as far as the routes know it, and the order that its workers insist on."""

    def __init__(self, size: int, record: Path, broken: bool) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=size, world_size_across_dp=size))
        self._size = size
        self._record = record
        self._broken = broken
        self.joining = 0
        self._ends: list[Any] = []
        self._ranks: list[int] = []
        self._active = False
        self._paused = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._paused = True
        self.mode = mode

    async def resume_generation(self) -> None:
        self._paused = False

    async def update_weight_version(self, version: str) -> None:
        self.label = version

    async def shutdown_weight_transfer_engine(self) -> None:
        if self._active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._ends.clear()

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        assert self._paused
        info = NCCLWeightTransferInitInfo(**request.init_info)
        assert info.packed
        self._ranks = [info.rank_offset + one for one in range(self._size)]
        if self._broken:
            await sleep(1)  # the others wait for it by now
            raise RuntimeError("broken")
        self._ends = await gather(*[to_thread(self._join, info, rank) for rank in self._ranks])

    async def start_weight_update(self) -> None:
        assert not self._active
        self._active = True

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        assert self._active
        info = NCCLWeightTransferUpdateInfo(**request.update_info)
        received = await gather(*[to_thread(self._receive, end, info) for end in self._ends])
        save_file(received[-1], self._record.with_suffix(".safetensors"))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._active
        assert weight_version is None
        self._active = False
        self._record.write_text(json.dumps({"ranks": self._ranks, "label": self.label, "mode": self.mode}))

    def _join(self, info: NCCLWeightTransferInitInfo, rank: int) -> Any:
        self.joining += 1
        try:
            return stateless_init_process_group(info.master_address, info.master_port, rank, info.world_size, 0)
        finally:
            self.joining -= 1

    def _receive(self, end: Any, info: NCCLWeightTransferUpdateInfo) -> dict[str, torch.Tensor]:
        assert end.disabled  # no NCCL here
        received = {}
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = end.group.broadcast(None, src=0)
            assert (weight.dtype, list(weight.shape)) == (getattr(torch, dtype), shape)
            received[name] = weight
        return received


def app_of(record: Path, workers: int, flags: list[str], broken: bool) -> FastAPI:
    """Flags are read as vLLM's server reads them."""
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    transfer = parsed.weight_transfer_config
    app = FastAPI()
    app.include_router(router)
    app.include_router(info_router)
    engine = Workers(workers, record, broken)
    app.add_api_route("/health", lambda: {"joining": engine.joining})
    app.state.engine_client = engine
    app.state.vllm_config = VllmConfig(
        weight_transfer_config=transfer and WeightTransferConfig(backend=transfer.backend)
    )
    return app


async def main(folder: str, *servers: str) -> None:
    """Serve until killed."""
    running = []
    for one in map(json.loads, servers):
        app = app_of(Path(folder) / f"{one['name']}.json", one["workers"], one["flags"], one["name"] == "broken")
        config = uvicorn.Config(app, host="127.0.0.1", port=one["port"], log_level="warning")
        running.append(uvicorn.Server(config).serve())
    await gather(*running)


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
