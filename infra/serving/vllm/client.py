"""A policy on vLLM servers, as a `PolicyClient`."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from infra.serving.vllm import probe
from infra.serving.vllm.connections import Connections
from infra.serving.vllm.failures import ServerDownError, ServerUnfitError
from infra.serving.vllm.io_thread import IoThread
from infra.serving.vllm.local_servers import LocalServers
from infra.serving.vllm.replica import Publication, Replica, ServedAdapter, ServedVersion
from infra.serving.vllm.served_folder import served_adapter, served_folder
from infra.serving.vllm.server_api import ServerApi, key_header
from infra.serving.vllm.weight_label import base_label
from infra.serving.vllm.weight_transfer import WeightTransfer
from infra.store.adapter_folder import is_adapter, whole_folder
from mgrpo_core.config import ServingConfig
from mgrpo_core.errors import ConfigError, PolicyServerError, ShapeError
from mgrpo_core.rollout.protocols import Generation, Sampling

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

Tokenize = Callable[[str], Sequence[int]]


class VllmPolicyClient:
    """Asks a policy's servers. A trajectory keeps to one of them, whose cache holds its prefix, while that answers.

    Requests and versions go through one event loop in a thread of its own, so `load` may be called from anywhere.

    Args:
        policy: its name, which the servers must serve under.
        context_length: most tokens of prompt plus completion.
        urls: of the servers, equal among each other.
        dtype: of their computation: how exactly they can prove a version.
        serving: time-outs, deadline, concurrency.
        tokenize: the trainer's, special tokens in the text read as such and none added.
        label_of: version -> what its weights are called at the servers; different weights, different labels.
        scratch: folder for what has to be laid out otherwise for vLLM than the trainer wrote it, where `serving` names
            none.
        ours: those of the servers that are started and stopped here.
        transfer: how weights come to the servers; None = by folder.
    """

    def __init__(
        self,
        policy: str,
        context_length: int,
        urls: Sequence[str],
        *,
        dtype: str,
        serving: ServingConfig,
        tokenize: Tokenize,
        label_of: Callable[[int], str],
        scratch: Path,
        ours: LocalServers | None = None,
        transfer: WeightTransfer | None = None,
    ) -> None:
        self._policy = policy
        self._context_length = context_length
        self._urls = list(urls)
        self._dtype = dtype
        self._serving = serving
        self._tokenize = tokenize
        self._label_of = label_of
        self._scratch = Path(serving.folder or scratch).absolute()
        self._ours = ours
        self._transfer = transfer
        self._io = IoThread(f"mgrpo-vllm-{policy}")
        self._http: Connections | None = None
        self._replicas: list[Replica] = []
        self._wanted: ServedVersion | None = None
        self._version: int | None = None
        self._in_flight = 0
        self._down_since: float | None = None
        self._last_failure: ServerDownError | None = None
        self._closed = False
        self.publications: tuple[Publication, ...] = ()
        """How each server came to the version loaded last."""

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def context_length(self) -> int:
        """Most tokens of prompt plus completion."""
        return self._context_length

    @property
    def version(self) -> int | None:
        """The version that every server has proven; None before the first `load`."""
        return self._version

    @property
    def load_figures(self) -> dict[str, float]:
        """Of the last `load`: bytes that the servers read, and the largest difference of a probe, nats."""
        return {
            "bytes": float(sum(one.loaded_bytes for one in self.publications)),
            **({"probe_gap": max(one.gap.most for one in self.publications)} if self.publications else {}),
        }

    def load(self, version: int, folder: Path) -> None:
        """Have every server hold the version in `folder`, and prove it. Blocks.

        Raises:
            ConfigError: a server is not one for this policy.
            PolicyServerError: requests are in flight; a server stayed down for the deadline, cannot load the version,
                or computes something else than the trainer's weights say. No version is in use then.
        """
        self._require_open()
        if self._in_flight:
            raise PolicyServerError(
                f"policy {self._policy!r}: version {version} cannot be loaded while {self._in_flight} requests are in "
                f"flight at version {self._version}. Await or cancel them first."
            )
        self._version = None
        former, wanted = self._wanted, self._laid_out(version, folder.absolute())
        self._wanted = wanted
        self.publications = self._io.run(self._publish(wanted))
        self._version = version
        for one in self.publications:
            _log.info(
                "Policy %s: version %s at %s, %.2f MB loaded and proven in %.2f s; the probe differs by %.1g at most.",
                self._policy, version, one.url, one.loaded_bytes / 2**20, one.seconds, one.gap.most,
            )  # fmt: skip
        for folder in _folders(former) - _folders(wanted):
            if folder.is_relative_to(self._scratch):
                shutil.rmtree(folder, ignore_errors=True)

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, *, trajectory_id: str) -> Generation:
        """Sample one completion; see `PolicyClient.generate`. Cancelling the caller cancels it at the server.

        Raises:
            PolicyServerError: no server could, within the deadline; or none is fit to.
            ShapeError, ConfigError: the request itself is wrong; a bug of the caller.
        """
        self._require_open()
        prompt_ids = self._checked(prompt_ids, sampling)
        self._in_flight += 1
        try:
            return await asyncio.wrap_future(self._io.submit(self._generate(prompt_ids, sampling, trajectory_id)))
        finally:
            self._in_flight -= 1

    def close(self) -> None:
        """Give up what is in flight, and every connection. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._ours is not None:  # before the threads end that started them
            self._ours.stop()
        if self._http is not None:
            self._io.run(self._http.aclose())
        self._io.close()

    def __enter__(self) -> "VllmPolicyClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _laid_out(self, version: int, folder: Path) -> ServedVersion:
        label, moved = self._label_of(version), self._serving.folder is not None
        text_ids = [int(one) for one in self._tokenize(probe.TEXT)]
        adapter = None
        if is_adapter(folder):
            adapter = ServedAdapter(label, served_adapter(folder, self._scratch / label, moved=moved))
        return ServedVersion(
            policy=self._policy,
            version=version,
            label=label,
            folder=served_folder(whole_folder(folder), self._scratch / base_label(label), moved=moved),
            dtype=self._dtype,
            context=self._context_length,
            text_ids=tuple(text_ids),
            probe=probe.probe_of(folder, text_ids, self._context_length),
            adapter=adapter,
        )

    async def _publish(self, wanted: ServedVersion) -> tuple[Publication, ...]:
        """Bring every server up, side by side; the first error counts when all have ended."""
        self._open_connections()
        self._down_since = None
        done = await asyncio.gather(*[self._bring_up(one, wanted) for one in self._replicas], return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return tuple(one for one in done if isinstance(one, Publication))

    async def _bring_up(self, replica: Replica, wanted: ServedVersion) -> Publication | None:
        end = time.monotonic() + self._serving.deadline_s
        pause_s = 0.0
        while True:
            try:
                return await replica.bring_up(wanted)
            except ServerDownError as error:
                replica.failed(error)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s or _FIRST_PAUSE_S)
                if time.monotonic() + pause_s > end:
                    raise PolicyServerError(
                        f"policy {self._policy!r}: its server {replica.api.url} could not be brought to version "
                        f"{wanted.version} within {self._serving.deadline_s:g} s (serving.deadline_s). {error} "
                        f"Start it: mgrpo serve {self._policy}"
                    ) from error
                await asyncio.sleep(pause_s)

    async def _generate(self, prompt_ids: np.ndarray, sampling: Sampling, trajectory_id: str) -> Generation:
        wanted = self._wanted
        assert wanted is not None
        order = _preferred(self._replicas, trajectory_id)
        failing_since: float | None = None
        pause_s = 0.0
        while True:
            replica = min(order, key=lambda one: one.rest_s)  # the first by preference among those awake
            # Down for the deadline already: one request at a time still tries, the others do not wait for it.
            if replica.rest_s and self._down_since is not None and self._last_failure is not None:
                self._require_patience(self._down_since, 0.0, self._last_failure)
            await asyncio.sleep(max(pause_s, replica.rest_s))
            try:
                await replica.bring_up(wanted)
            except (ServerUnfitError, ConfigError) as error:
                order.remove(replica)
                if not order:
                    raise PolicyServerError(str(error)) from error
                _log.warning("Policy %s: %s Its other servers are asked.", self._policy, error)
                continue
            except ServerDownError as error:
                failure = error
            else:
                try:
                    sampled = await replica.generate(wanted, prompt_ids, sampling)
                except ServerDownError as error:
                    failure = error
                else:
                    self._down_since = None
                    return Generation(sampled.token_ids, sampled.logprobs, sampled.finish_reason, wanted.version)
            replica.failed(failure)
            order = [*(one for one in order if one is not replica), replica]
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s or _FIRST_PAUSE_S)
            failing_since = failing_since or time.monotonic()
            self._down_since = self._down_since or failing_since
            self._last_failure = failure
            self._require_patience(failing_since, pause_s, failure)

    def _require_patience(self, since: float, pause_s: float, error: ServerDownError) -> None:
        """Raise once there have been nothing but failures for the deadline."""
        failing_s = time.monotonic() - since
        if failing_s + pause_s < self._serving.deadline_s:
            return
        raise PolicyServerError(
            f"no server of policy {self._policy!r} ({', '.join(self._urls)}) has answered for {failing_s:.0f} s "
            f"(serving.deadline_s {self._serving.deadline_s:g}). Last: {error}"
        ) from error

    def _open_connections(self) -> None:
        if self._http is not None:
            return
        serving = self._serving
        most = (serving.concurrency + 4) * len(self._urls)
        self._http = Connections(
            key_header(), connect_timeout_s=serving.connect_timeout_s, timeout_s=serving.timeout_s, most=most
        )
        self._replicas = [
            Replica(
                ServerApi(self._http, url, self._policy),
                serving.concurrency,
                self._ours and self._ours.ensure,
                self._transfer,
            )
            for url in self._urls
        ]

    def _require_open(self) -> None:
        if self._closed:
            raise PolicyServerError(f"policy {self._policy!r}: the client is closed; make a new one.")

    def _checked(self, prompt_ids: np.ndarray, sampling: Sampling) -> np.ndarray:
        where = f"policy {self._policy!r}"
        if self._version is None:
            raise PolicyServerError(f"{where}: no weights yet; call load(version, folder) before generate.")
        prompt_ids = np.asarray(prompt_ids)
        if prompt_ids.ndim != 1 or len(prompt_ids) == 0:
            raise ShapeError(f"{where}: prompt_ids of shape {prompt_ids.shape}, expected [T] with T at least 1.")
        if sampling.max_tokens < 1:
            raise ConfigError(f"{where}: max_tokens {sampling.max_tokens}, expected at least 1; end the turn instead.")
        if len(prompt_ids) + sampling.max_tokens > self._context_length:  # vLLM would cut max_tokens, or answer 400
            raise ShapeError(
                f"{where}: prompt of {len(prompt_ids)} tokens and max_tokens {sampling.max_tokens} exceed the context "
                f"of {self._context_length}. Ask for at most {self._context_length - len(prompt_ids)} tokens, or end "
                "the trajectory as context_full."
            )
        return prompt_ids


def _folders(served: ServedVersion | None) -> set[Path]:
    """That servers were told to read."""
    if served is None:
        return set()
    return {served.folder} if served.adapter is None else {served.folder, served.adapter.folder}


def _preferred(replicas: Sequence[Replica], trajectory_id: str) -> list[Replica]:
    """The servers in a trajectory's own order. Rendezvous hashing: one that is gone moves its own trajectories only."""
    return sorted(replicas, key=lambda one: blake2b(f"{trajectory_id}|{one.api.url}".encode(), digest_size=8).digest())
