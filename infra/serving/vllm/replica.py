"""One of a policy's servers as the client knows it: brought to the version in use, or resting after a failure."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra.serving.vllm import probe
from infra.serving.vllm.answers import SampledTokens
from infra.serving.vllm.failures import NotThereError, ServerDownError, ServerFailedError, ServerUnfitError
from infra.serving.vllm.probe import Probe, ProbeGap
from infra.serving.vllm.server_api import ServerApi
from infra.serving.vllm.weight_label import base_label
from infra.serving.vllm.weight_transfer import ByFolder, WeightTransfer
from infra.store.adapter_folder import ADAPTER_WEIGHTS
from mgrpo_core.errors import ConfigError, PolicyServerError
from mgrpo_core.rollout.protocols import Sampling

_log = logging.getLogger(__name__)

_FIRST_REST_S = 0.1
_LONGEST_REST_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A LoRA adapter of a server.

    Attributes:
        name: that requests ask for; no other adapter ever has it, so it says which version made a token.
        folder: that the server reads.
    """

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """What every server of a policy shall hold.

    Attributes:
        label: by which a server says that it holds it.
        folder: that the server reads, from `served_folder`: of all weights, or of those below an adapter.
        probe: what the trainer's weights say.
    """

    policy: str
    version: int
    label: str
    folder: Path
    dtype: str
    context: int
    text_ids: tuple[int, ...]
    probe: Probe
    adapter: ServedAdapter | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """How a server came to a version.

    Attributes:
        loaded_bytes: that it read; 0 where it held the version already, and only proved it.
        seconds: in all.
        gap: of the probe.
    """

    url: str
    loaded_bytes: int
    seconds: float
    gap: ProbeGap


Start = Callable[[str, ServedVersion], None]
"""Makes the server of a URL run where that is up to us; blocks until it does."""


class Replica:
    """A server, how many requests it has, and whether it is ready.

    Args:
        api: its routes.
        concurrency: requests at once; others wait here.
        start: see `Start`.
        transfer: how weights come to it; None = by folder.
    """

    def __init__(
        self, api: ServerApi, concurrency: int, start: Start | None = None, transfer: WeightTransfer | None = None
    ) -> None:
        self.api = api
        self._slots = asyncio.Semaphore(concurrency)
        self._start = start
        self._transfer = transfer or ByFolder()
        self._bringing_up = asyncio.Lock()
        self._holds: str | None = None
        self._rest_s = 0.0
        self._rests_until = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds until it is worth asking again."""
        return max(0.0, self._rests_until - time.monotonic())

    def failed(self, error: ServerDownError) -> None:
        """Let it rest, twice as long as last time, and have it prove itself again: it may come back with other weights.

        Failures of requests that were under way together count once; a request that it failed at says nothing of it.
        """
        if isinstance(error, ServerFailedError):
            return
        self._holds = None
        if self.rest_s == 0:
            self._rest_s = min(_LONGEST_REST_S, 2 * self._rest_s or _FIRST_REST_S)
            self._rests_until = time.monotonic() + self._rest_s

    async def generate(self, wanted: ServedVersion, prompt_ids: np.ndarray, sampling: Sampling) -> SampledTokens:
        """Sample one completion with the weights wanted, and no others; `bring_up` comes first.

        Raises: ServerDownError, ServerUnfitError.
        """
        async with self._slots:
            sampled = await self._sample(wanted, prompt_ids, sampling)
        self._require(wanted, sampled)
        self._rest_s = 0.0
        return sampled

    async def bring_up(self, wanted: ServedVersion) -> Publication | None:
        """Check what the server is, have it hold the version, and have it prove so. None: it holds it, and has.

        Order: weights or adapter, then the cached keys that belong to the old ones, then the label, then the proof.

        Raises:
            ConfigError: it is another model, has another tokenizer, or too short a context.
            ServerDownError: it failed meanwhile.
            ServerUnfitError: it cannot be brought to this version, or does not prove it.
        """
        if self._holds == wanted.label:
            return None
        async with self._bringing_up:
            if self._holds == wanted.label:
                return None
            started = time.monotonic()
            if self._start is not None:
                await self._run_ours(self._start, wanted)
            names = await self._check(wanted)
            await self._transfer.check(self.api)
            read = await self._load(wanted, names)

            async def sample(prompt_ids: np.ndarray, sampling: Sampling) -> tuple[int, float]:
                sampled = await self._sample(wanted, prompt_ids, sampling)
                self._require(wanted, sampled)
                return int(sampled.token_ids[0]), float(sampled.logprobs[0])

            where = f"policy {wanted.policy!r} version {wanted.version} at {self.api.url}"
            try:
                gap = await probe.prove(wanted.probe, sample, wanted.dtype, where)
            except ServerUnfitError:
                await self._disown(wanted)
                raise
            self._holds = wanted.label
            return Publication(self.api.url, read, time.monotonic() - started, gap)

    async def _load(self, wanted: ServedVersion, names: Collection[str]) -> int:
        """Have the server hold the version, unless it says that it does; how many bytes it read.

        Args:
            wanted: see there.
            names: of the models and adapters that the server knows.
        """
        held, adapter, read = await self.api.weight_label(), wanted.adapter, 0
        if held == wanted.label and (adapter is None or adapter.name in names):
            return 0
        if base_label(held) != base_label(wanted.label):
            await self._transfer.load(self.api, wanted)
            read += _bytes_of(wanted.folder)
        if adapter is not None:
            if adapter.name in names:  # and not to be trusted
                await self.api.unload_adapter(adapter.name)
            await self.api.load_adapter(adapter.name, adapter.folder)
            read += (adapter.folder / ADAPTER_WEIGHTS).stat().st_size
        for name in names:
            if name.startswith(f"{wanted.policy}/") and (adapter is None or name != adapter.name):
                await self.api.unload_adapter(name)
        await self.api.forget_prefixes()
        await self.api.set_weight_label(wanted.label)
        return read

    async def _sample(self, wanted: ServedVersion, prompt_ids: np.ndarray, sampling: Sampling) -> SampledTokens:
        if wanted.adapter is None:
            return await self.api.generate(prompt_ids, sampling)
        try:
            return await self.api.generate(prompt_ids, sampling, wanted.adapter.name)
        except NotThereError as error:
            self._holds = None
            raise ServerDownError(
                f"{error} It had loaded this adapter, and knows it no more: it was restarted, or another run loaded "
                "its own."
            ) from error

    async def _run_ours(self, start: Start, wanted: ServedVersion) -> None:
        try:
            await asyncio.to_thread(start, self.api.url, wanted)
        except PolicyServerError as error:  # it waited long enough: starting it once more would not help
            raise ServerUnfitError(str(error)) from error

    async def _disown(self, wanted: ServedVersion) -> None:
        """Take the label back, so that nobody trusts these weights for it."""
        try:
            await self.api.set_weight_label(f"not {wanted.label}")
        except (ServerDownError, ServerUnfitError) as error:
            _log.warning("The label of weights that failed their proof could not be taken back: %s", error)

    async def _check(self, wanted: ServedVersion) -> tuple[str, ...]:
        """Names of what the server serves, where it is one for this policy."""
        card, url = await self.api.model_card(), self.api.url
        if wanted.policy not in card.names:
            raise ConfigError(
                f"policies.{wanted.policy}.servers: {url} serves {', '.join(card.names) or 'nothing'}, expected "
                f"{wanted.policy!r}. Give the URL of its own server, or start one: mgrpo serve {wanted.policy}"
            )
        if card.context is not None and card.context < wanted.context:
            raise ConfigError(
                f"policies.{wanted.policy}.context: {wanted.context}, but {url} takes {card.context} tokens at most. "
                f"Lower it, or start the server with --max-model-len {wanted.context}, as `mgrpo serve` does."
            )
        theirs, ours = await self.api.tokenize(probe.TEXT), list(wanted.text_ids)
        if theirs != ours:
            at = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), -1)
            raise ConfigError(
                f"policies.{wanted.policy}.servers: {url} has another tokenizer than the policy's version "
                f"{wanted.version}: {len(theirs)} ids of a fixed text, expected {len(ours)}; they part at {at}. Start "
                "the server from the policy's own folder, with `mgrpo serve`."
            )
        return card.names

    def _require(self, wanted: ServedVersion, sampled: SampledTokens) -> None:
        if sampled.labels != (wanted.label,):
            self._holds = None
            raise ServerDownError(
                f"{self.api.url}: sampled with weights {' then '.join(sampled.labels)}, expected {wanted.label}. "
                "It was restarted, or another run loaded its own weights."
            )


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
