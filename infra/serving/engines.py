"""What samples a policy's tokens: an engine in this process, or vLLM servers. Chosen here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from infra.serving.embedded import EmbeddedPolicyClient
from infra.serving.vllm.build import find_build
from infra.serving.vllm.client import VllmPolicyClient
from infra.serving.vllm.local_servers import LocalServers
from infra.serving.vllm.nccl_transfer import NcclTransfer
from mgrpo_core.config import RunConfig
from mgrpo_core.config.policies import LOCAL_SERVER
from mgrpo_core.errors import ConfigError
from mgrpo_core.rollout.protocols import PolicyClient


class PolicyEngine(PolicyClient, Protocol):
    """A policy client that can be given weights."""

    @property
    def version(self) -> int | None:
        """What it samples from; None before the first `load`."""
        ...

    @property
    def load_figures(self) -> Mapping[str, float]:
        """Of the last `load`, where servers had a part in it; its duration is the caller's to measure."""
        ...

    def load(self, version: int, folder: Path) -> None:
        """Sample from the version in `folder` from now on, or raise. No request may be in flight."""
        ...

    def close(self) -> None:
        """Stop it. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """Where an engine may put things.

    Attributes:
        label_of: version -> a name for its weights that no other weights have.
        scratch: folder of this process.
        logs: folder for the output of servers, and of senders, that are started here.
    """

    label_of: Callable[[int], str]
    scratch: Path
    logs: Path


def engine_of(
    config: RunConfig, policy: str, context_length: int, tokenizer: PreTrainedTokenizerBase, places: EnginePlaces
) -> PolicyEngine:
    """The engine that the policy's config asks for; it holds no weights yet.

    Raises: ConfigError that names `make vllm` where vLLM is needed here, and missing.
    """
    settings = config.policies[policy]
    if not settings.servers:
        return EmbeddedPolicyClient(
            policy,
            context_length,
            dtype=torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32,
            threads=config.execution.threads,
        )
    ours = _local_servers(config, policy, places.logs)
    urls = (*(url for url in settings.servers if url != LOCAL_SERVER), *(ours.urls if ours else ()))

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    return VllmPolicyClient(
        policy,
        context_length,
        urls,
        dtype=settings.dtype,
        serving=settings.serving,
        tokenize=tokenize,
        label_of=places.label_of,
        scratch=places.scratch,
        ours=ours,
        transfer=_by_nccl(config, policy, places.logs) if settings.serving.transfer == "nccl" else None,
    )


def _by_nccl(config: RunConfig, policy: str, logs: Path) -> NcclTransfer:
    try:
        build = find_build()
    except ConfigError as error:
        raise ConfigError(
            f"policies.{policy}.serving.transfer: nccl sends with vLLM's own code, from this machine. {error}"
        ) from error
    return NcclTransfer(policy, build, logs / f"nccl-{policy}.log", config.policies[policy].serving)


def _local_servers(config: RunConfig, policy: str, logs: Path) -> LocalServers | None:
    settings = config.policies[policy]
    count = settings.servers.count(LOCAL_SERVER)
    if count == 0:
        return None
    on_this_machine = sum(one.servers.count(LOCAL_SERVER) for one in config.policies.values())
    build = find_build(servers=on_this_machine)
    rank = settings.lora.rank if settings.lora is not None else None
    return LocalServers(policy, count, build, logs, settings.serving.start_deadline_s, lora_rank=rank)
