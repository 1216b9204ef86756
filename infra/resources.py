"""What one process holds of a run between its stages: store, config, data, engines, tools, judges. Opened once."""

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from infra.datasets.queries import load_queries
from infra.judges.registry import build_judge
from infra.progress import ProgressBoard
from infra.serving.context_length import context_of
from infra.serving.engines import EnginePlaces, PolicyEngine, engine_of
from infra.serving.vllm.weight_label import weight_label
from infra.stage_clock import StageClock
from infra.store.files import StoreFiles
from infra.store.leases import Lease, Owner, creating_run
from infra.store.policies import PolicyVersion, fetch_version, find_version, publish_version, require_version
from infra.store.runs import StoredRun, create_or_open_run
from infra.team import team_of
from infra.tracking.history import RunHistory
from infra.tracking.mlflow_tracker import MlflowTracker, local_uri
from infra.tracking.tracker import MemoryTracker, Tracker
from infra.training.adapters import require_targets
from infra.training.load_policy import load_policy, load_tokenizer
from infra.training.policy_source import initial_folder
from mgrpo_core.config import PolicyConfig, RunConfig
from mgrpo_core.data_order import Batch, DataCursor, next_batch
from mgrpo_core.dialogue.template import ChatTemplate, ChatTokenizer
from mgrpo_core.errors import ConfigError
from mgrpo_core.rewards.verifiers import Verifier, verifier_of
from mgrpo_core.rollout.protocols import Judge
from mgrpo_core.trajectories import Query


class RunResources:
    """Everything a run's stages share in one process.

    A plain class on purpose: Prefect walks through dataclasses and mappings among a task's arguments, and must not walk
    through a model.
    """

    def __init__(self, run: StoredRun, config: RunConfig, progress: ProgressBoard, cache: Path) -> None:
        """Raises: ConfigError, DatasetError: what would stop the first iteration, before it starts."""
        self.run = run
        self.config = config
        self.progress = progress
        self.cache = cache
        self.queries: tuple[Query, ...] = load_queries(config.data.train)
        batch = config.rollout.queries_per_iteration
        if batch > len(self.queries):
            raise ConfigError(
                f"rollout.queries_per_iteration: {batch} cannot be filled from the {len(self.queries)} queries of "
                f"data.train {config.data.train!r}. Use at most {len(self.queries)}, or more data."
            )
        self.verifier: Verifier = verifier_of(config.agents[config.main_agent].verifier)
        self.judges: dict[str, Judge] = {
            name: build_judge(agent.judge) for name, agent in config.agents.items() if agent.judge is not None
        }
        self.team = team_of(config)
        self.tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self.clients: dict[str, PolicyEngine] = {}
        self.tracker: Tracker = _tracker(run.files, config)
        self.history = RunHistory(run.files, run.name)
        self.picture_drawn_at = -math.inf
        self.clock = StageClock()
        self.lease: Lease | None = None

    @property
    def curves_file(self) -> Path:
        """Where the picture of the curves is kept for people: beside the run on a local store, else in this folder."""
        folder = self.files.local(self.run.name) or Path("mgrpo-out") / self.run.name
        return folder / "curves.png"

    @property
    def files(self) -> StoreFiles:
        return self.run.files

    def queries_at(self, indices: Sequence[int]) -> list[Query]:
        """The training queries at these places of the dataset, in this order."""
        return [self.queries[index] for index in indices]

    def next_batch(self, cursor: DataCursor) -> Batch:
        """The training queries of the iteration that begins at a cursor."""
        config = self.config
        size = config.rollout.queries_per_iteration
        return next_batch(cursor, len(self.queries), size, config.seed, shuffle=config.data.shuffle)

    def held_out(self) -> tuple[Query, ...]:
        """The held-out questions.

        Raises: ConfigError if the config names none.
        """
        if self.config.data.held_out is None:
            raise ConfigError("data.held_out: missing. Name a query file to evaluate on.")
        return load_queries(self.config.data.held_out)

    def version(self, policy: str, version: int) -> PolicyVersion:
        """A stored version. Raises: TableIntegrityError if it is missing."""
        return require_version(self.files, self.run.name, policy, self.config.store_folder_of(policy), version)

    def folder(self, policy: str, version: int) -> Path:
        """A stored version as a verified local folder."""
        return fetch_version(self.files, self.version(policy, version), self.cache)

    def serve(self, versions: Mapping[str, int]) -> dict[str, float]:
        """Have the engine of every policy hold these versions; what it holds already is not loaded again.

        Returns figures of the versions that were loaded: `publish/<policy>/…`, see docs/metrics.md.

        Raises: PolicyServerError, ConfigError: what an engine says that cannot.
        """
        for policy, version in versions.items():
            if policy not in self.clients:
                self._start(policy, version)
        missing = {policy: number for policy, number in versions.items() if self.clients[policy].version != number}
        if not missing:
            return {}
        # Side by side: servers take their time to start, and to load.
        threads = ThreadPoolExecutor(len(missing), thread_name_prefix="mgrpo-load")
        try:
            loads = [threads.submit(self._load, policy, number) for policy, number in missing.items()]
            wait(loads)
            return {name: value for load in loads for name, value in load.result().items()}
        except BaseException as stopped:
            if not isinstance(stopped, Exception):  # interrupted: a server that is being started would be waited for
                self.close()
            raise
        finally:
            threads.shutdown(wait=False)

    def _load(self, policy: str, version: int) -> dict[str, float]:
        client, started = self.clients[policy], time.perf_counter()
        client.load(version, self.folder(policy, version))
        figures = {**client.load_figures, "seconds": time.perf_counter() - started}
        return {f"publish/{policy}/{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Stop the engines."""
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def _start(self, policy: str, version: int) -> None:
        folder = self.folder(policy, version)
        tokenizer = load_tokenizer(folder)
        places = EnginePlaces(
            label_of=lambda number: weight_label(self.version(policy, number)),
            scratch=self.cache / "served",
            logs=Path("mgrpo-out") / self.run.name,
        )
        context = self.config.policies[policy].context or context_of(folder)
        self.clients[policy] = engine_of(self.config, policy, context, tokenizer, places)
        self.tokenizers[policy] = tokenizer


@contextmanager
def open_resources(
    files: StoreFiles, name: str, config: RunConfig, *, progress: ProgressBoard, accept_config_change: bool = False
) -> Iterator[RunResources]:
    """Create or open the run, and hold what its stages need until the block ends.

    Bad input is refused before the run exists: data, tools, judges and policies are read first.
    """
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mgrpo-policies-")))
        resources = RunResources(StoredRun(files, name), config, progress, cache)
        stack.callback(resources.close)
        new = {name: _checked_source(config.policies[name]) for name, _ in _missing_policies(resources)}
        create_or_open_run(files, name, config, accept_config_change=accept_config_change)
        if new:
            with creating_run(files, name, Owner.this_process(f"the start of {name}")):
                _publish_first_versions(resources, new)
        yield resources


def _tracker(files: StoreFiles, config: RunConfig) -> Tracker:
    tracking = config.tracking
    if not tracking.mlflow:
        return MemoryTracker()
    uri = tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri(files.url, Path("mgrpo-out"))
    return MlflowTracker(uri, tracking.experiment)


def _missing_policies(resources: RunResources) -> Iterator[tuple[str, str]]:
    """Policies without a version 0 in the store, and where it comes from."""
    for name, policy in resources.config.policies.items():
        folder = resources.config.store_folder_of(name)
        if find_version(resources.files, resources.run.name, name, folder, 0) is None:
            yield name, policy.init


def _publish_first_versions(resources: RunResources, sources: Mapping[str, Path]) -> None:
    """Those that are still missing: another process may have started the run at the same moment."""
    run = resources.run
    for policy, init in _missing_policies(resources):
        publish_version(
            run.files,
            run.name,
            policy,
            resources.config.store_folder_of(policy),
            0,
            sources[policy],
            parent_sha256=None,
            inputs_sha256=hashlib.sha256(init.encode()).hexdigest(),
        )


def _checked_source(policy: PolicyConfig) -> Path:
    """The folder of a version 0, loadable, with a chat template that rollouts can use, and with a place for an adapter.

    Raises: ConfigError, TemplateError.
    """
    source = initial_folder(policy.init)
    model, tokenizer = load_policy(source, torch.float32)
    ChatTemplate(cast("ChatTokenizer", tokenizer))
    if policy.lora is not None:
        require_targets(model, policy.lora)
    return source
