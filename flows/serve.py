"""`mgrpo serve`: a vLLM server for one policy version of a run, in vLLM's own environment."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from infra.serving.context_length import context_of
from infra.serving.vllm.build import find_build
from infra.serving.vllm.command import ServerSettings
from infra.serving.vllm.connections import Connections
from infra.serving.vllm.served_folder import served_folder
from infra.serving.vllm.server_api import ServerApi, key_header
from infra.serving.vllm.server_process import ServerProcess
from infra.serving.vllm.weight_label import base_label, weight_label
from infra.store.adapter_folder import adapter_rank, is_adapter, whole_folder
from infra.store.manifests import newest_committed, read_manifest
from infra.store.policies import fetch_version, require_version
from infra.store.runs import StoredRun, newest_config, open_store, policy_versions, require_run
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import ConfigError, PolicyServerError


@dataclass(frozen=True, slots=True)
class Serving:
    """What is to be served, and how.

    Attributes:
        version: None = that of the newest committed iteration.
        python: of the environment that has vLLM; None = MGRPO_VLLM_PYTHON, or .venv-vllm here.
        cache: folder for what is downloaded, or laid out for vLLM.
        extra: further options of vLLM's server, as they are.
    """

    policy: str
    run: str
    store: str
    version: int | None
    host: str
    port: int
    python: Path | None
    cache: Path
    extra: tuple[str, ...] = ()


def serve_policy(serving: Serving, say: Callable[[str], None]) -> int:
    """Serve until the server ends, by itself or by SIGINT or SIGTERM, which it is handed. Returns its exit code.

    Raises:
        ConfigError: no such policy, or no vLLM.
        StoreError: no such run or version, or a damaged one.
        PolicyServerError: the server did not come up.
    """
    build = find_build(serving.python)
    stored = require_run(open_store(serving.store), serving.run)
    config = newest_config(stored)
    if serving.policy not in config.policies:
        raise ConfigError(
            f"policy {serving.policy!r}: run {serving.run!r} has none of this name. Name one of: "
            f"{', '.join(config.policies)}."
        )
    settings = config.policies[serving.policy]
    version = serving.version if serving.version is not None else _newest(stored, config, serving.policy)
    found = require_version(stored.files, serving.run, serving.policy, config.store_folder_of(serving.policy), version)
    folder = fetch_version(stored.files, found, serving.cache).absolute()
    label = weight_label(found)
    place = serving.cache.absolute() / "served" / base_label(label)
    server = ServerSettings(
        serving.policy,
        served_folder(whole_folder(folder), place),
        settings.dtype,
        settings.context or context_of(folder),
        serving.host,
        serving.port,
        serving.extra,
        settings.lora.rank if settings.lora is not None else adapter_rank(folder),
        nccl=settings.serving.transfer == "nccl",
    )
    say(f"Starting vLLM {build.version} for policy {serving.policy}, version {version} of run {serving.run}.")
    if serving.host not in ("127.0.0.1", "::1", "localhost"):
        say(f"Whoever reaches {serving.host}:{serving.port} can change its weights, with or without an API key.")
    with ServerProcess(build, server) as process, _handed_to(process) as stopped:
        try:
            process.wait_until_it_answers(settings.serving.start_deadline_s)
            asyncio.run(_label(process.url, serving.policy, label, folder if is_adapter(folder) else None))
        except PolicyServerError:
            if not stopped:
                raise
        else:
            say(f"Policy {serving.policy}, version {version}, answers at {process.url}; Ctrl-C stops it.")
        code = process.wait()
    return code if code >= 0 else 128 - code


def _newest(stored: StoredRun, config: RunConfig, policy: str) -> int:
    newest = newest_committed(stored.files, stored.name)
    manifest = read_manifest(stored.files, stored.name, newest) if newest >= 0 else None
    return policy_versions(config, manifest)[policy]


async def _label(url: str, policy: str, label: str, adapter: Path | None) -> None:
    async with Connections(key_header()) as http:
        api = ServerApi(http, url, policy)
        if adapter is not None:
            await api.load_adapter(label, adapter)
        await api.set_weight_label(label)


@contextmanager
def _handed_to(process: ServerProcess) -> Iterator[list[int]]:
    """SIGINT and SIGTERM go to the server; it ends, and so do we, with its exit code. Gives those that came."""
    came: list[int] = []

    def hand_over(number: int, _: FrameType | None) -> None:
        came.append(number)
        process.signal(number)

    before = {one: signal.signal(one, hand_over) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
