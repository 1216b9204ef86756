"""Replay: a committed iteration recomputed from its stored tables and policy versions, and compared stage by stage."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.replay.credit import replay_advantages, replay_alignment, replay_rewards
from infra.replay.verdicts import Difference, Outcome, ReplayReport, StageVerdict, Through, unreadable
from infra.store.code_version import code_version
from infra.store.export_record import read_partial, require_policies
from infra.store.manifests import Manifest, read_manifest
from infra.store.runs import StoredRun, open_store, require_run
from infra.store.stored_iteration import StoredIteration, open_stored, require_committed
from mgrpo_core.errors import MGRPOError, TableIntegrityError

_CREDIT: Mapping[str, Callable[[StoredIteration], StageVerdict]] = {
    "alignment": replay_alignment,
    "advantages": replay_advantages,
}


def replay_stored(store: str, run: str, iteration: int, through: Through) -> ReplayReport:
    """`replay_iteration` of a run by its name; policy versions are downloaded to a folder that goes afterwards.

    Raises: StoreError if there is no such run, ConfigError if the iteration is not committed.
    """
    found = require_run(open_store(store), run)
    with tempfile.TemporaryDirectory(prefix="mgrpo-policies-") as cache:
        return asyncio.run(replay_iteration(found, iteration, through=through, cache=Path(cache)))


async def replay_iteration(run: StoredRun, iteration: int, *, through: Through, cache: Path) -> ReplayReport:
    """Recompute an iteration and compare. Nothing is written but below `cache` and the system's temporary folder.

    Every stage starts from the stored tables before it, so that a fault is told of in the stage where it is.

    Args:
        run: where it is.
        iteration: its number.
        through: the last stage.
        cache: where policy versions are downloaded to from a store that is not local.

    Raises: ConfigError if the iteration is not committed, or if the run is an export without the policies to update.
    """
    require_committed(run, iteration)
    if through == "update":
        require_policies(run.files, run.name)
    verdicts: list[StageVerdict] = []
    seconds: dict[str, float] = {}
    with _timed(seconds, "manifest"):
        verdict, stored = _opened(run, iteration)
    verdicts.append(verdict)
    if stored is None:
        return ReplayReport(run.name, iteration, through, tuple(verdicts), (), seconds)
    with _timed(seconds, "rewards"):
        verdicts.append(await _attempt("rewards", lambda: replay_rewards(stored)))
    for stage, replay in _CREDIT.items():
        with _timed(seconds, stage):
            verdicts.append(await _attempt(stage, lambda replay=replay: _at_once(replay, stored)))
    if through == "update":
        from infra.replay.updates import replay_updates  # torch

        with _timed(seconds, "updates"):
            verdicts.extend(replay_updates(stored, cache))
    return ReplayReport(run.name, iteration, through, tuple(verdicts), _notes(run, stored.manifest), seconds)


def _opened(run: StoredRun, iteration: int) -> tuple[StageVerdict, StoredIteration | None]:
    """The verdict on the manifest: its place in the chain, and the config that it names."""
    try:
        stored = open_stored(run, iteration)
    except (MGRPOError, ValueError) as error:
        return unreadable("manifest", error), None
    try:
        found = _chain(run, stored)
    except TableIntegrityError as error:
        return unreadable("manifest", error), stored
    outcome = Outcome.DIFFERS if found else Outcome.EQUAL
    return StageVerdict("manifest", outcome, 1, "manifests", int(found is not None), first=found), stored


def _chain(run: StoredRun, stored: StoredIteration) -> Difference | None:
    manifest = stored.manifest
    linked = not _link_left_out(run, manifest)
    before = read_manifest(run.files, run.name, manifest.iteration - 1) if manifest.iteration and linked else None
    parent = before.sha256 if before else None
    if linked and manifest.parent_sha256 != parent:
        words = (manifest.parent_sha256 or "none")[:12], (parent or "none")[:12]
        return Difference(None, None, "parent, the manifest before it", *words)
    lineage = stored.config.lineage_sha256()
    if manifest.lineage_sha256 != lineage:
        return Difference(None, None, "config's lineage", manifest.lineage_sha256[:12], lineage[:12])
    for policy, step in manifest.policies.items():
        came = before.manifest.policies.get(policy) if before else None
        if came is not None and came.to_version != step.from_version:
            words = str(step.from_version), str(came.to_version)
            return Difference(None, None, f"version that policy {policy} starts from", *words)
    return None


async def _attempt(stage: str, replay: Callable[[], Awaitable[StageVerdict]]) -> StageVerdict:
    """A stage's verdict; what is stored may be damaged in ways that no stage expects."""
    try:
        return await replay()
    except MGRPOError as error:
        return unreadable(stage, error)
    except (KeyError, ValueError, IndexError, ArithmeticError) as error:
        reason = f"what is stored makes no sense to this stage ({type(error).__name__}: {error}). Run `mgrpo verify`."
        return StageVerdict(stage, Outcome.UNREADABLE, reason=reason)


async def _at_once(replay: Callable[[StoredIteration], StageVerdict], stored: StoredIteration) -> StageVerdict:
    return replay(stored)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _link_left_out(run: StoredRun, manifest: Manifest) -> bool:
    """Whether the iteration before is not here, because the run is an export of others."""
    partial = read_partial(run.files, run.name)
    return partial is not None and manifest.iteration in partial.links_left_out()


def _notes(run: StoredRun, manifest: Manifest) -> tuple[str, ...]:
    here = code_version()
    notes: list[str] = []
    if _link_left_out(run, manifest):
        notes.append(f"iteration {manifest.iteration - 1} is not in this export: the link to it was not checked.")
    if manifest.code_version != here:
        notes.append(f"other code: the iteration was computed by {manifest.code_version}, this replay by {here}.")
    return tuple(notes)
