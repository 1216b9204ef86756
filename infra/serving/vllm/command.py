"""How a vLLM server for one policy is started: its command line and its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.serving.vllm.build import VllmBuild

# Tokens of one step of the engine: its memory, and how long a sampling row waits for others' prompts.
_BATCHED_TOKENS = 8192
# What --max-lora-rank may be.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server serves, and where.

    Attributes:
        policy: the name under which it answers.
        folder: of the weights, from `served_folder`.
        dtype: of the computation.
        context: most tokens of prompt plus completion.
        lora_rank: of the adapters that it will be given; None = none.
        extra: further options of the server.
        nccl: it will be given weights by NCCL.
    """

    policy: str
    folder: Path
    dtype: str
    context: int
    host: str
    port: int
    extra: tuple[str, ...] = ()
    lora_rank: int | None = None
    nccl: bool = False


def server_command(build: VllmBuild, settings: ServerSettings) -> list[str]:
    """The command line. No credential is on it: the server reads VLLM_API_KEY itself."""
    return [
        str(build.python),
        # the `vllm` script looks for a distribution of that name, which the CPU build is not
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={settings.folder}",
        f"--served-model-name={settings.policy}",
        f"--dtype={settings.dtype}",
        f"--max-model-len={settings.context}",
        # those of the density that sampled, temperature included: what the trainer recomputes
        "--logprobs-mode=processed_logprobs",
        # the route that takes and gives token ids, and says which weights made them
        "--enable-scale-out",
        # no sampling settings that the model's folder brings along
        "--generation-config=vllm",
        f"--host={settings.host}",
        f"--port={settings.port}",
        "--disable-uvicorn-access-log",
        # a prompt of any length that fits the context is computed in one step
        f"--max-num-batched-tokens={max(settings.context, _BATCHED_TOKENS)}",
        *(_lora_flags(settings.lora_rank) if settings.lora_rank else ()),
        *(['--weight-transfer-config={"backend": "nccl"}'] if settings.nccl else ()),
        *build.flags,
        *settings.extra,
    ]


def _lora_flags(rank: int) -> list[str]:
    """Room for one adapter, which makes way for the next one's."""
    return ["--enable-lora", "--max-loras=1", f"--max-lora-rank={min(one for one in _LORA_RANKS if one >= rank)}"]


def server_environment(build: VllmBuild, ours: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Ours without what points at our Python, and with the routes that take new weights switched on."""
    return {
        **{name: value for name, value in ours.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")},
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **build.environment,
    }
