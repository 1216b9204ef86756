"""Stage: the manifest, written last. Both policies or neither; then the iteration exists."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from prefect.runtime import flow_run

from infra.resources import RunResources
from infra.store import layout
from infra.store.code_version import code_version
from infra.store.files import FileRef
from infra.store.manifests import CommittedManifest, Manifest, PolicyStep, commit_manifest
from infra.store.staging import clear_staging
from infra.store.writer import new_writer
from infra.training.policy_update import PolicyUpdate
from tasks.iteration_ref import IterationRef
from tasks.stage import stage
from tasks.tables import TrajectoryTables


@stage
async def commit_iteration(
    resources: RunResources,
    at: IterationRef,
    tables: TrajectoryTables,
    small_tables: Sequence[FileRef],
    updates: Sequence[PolicyUpdate],
    metrics: Mapping[str, float],
) -> CommittedManifest:
    """Write metrics and manifest; clear the staging folder.

    Raises:
        AlreadyCommittedError: another process committed this iteration; its version of it stands.
        IterationTakenError: another process took this one for dead, and computes the iteration.
    """
    files = resources.files
    data = (json.dumps(dict(metrics), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    written = [
        at.queries,
        *(ref for refs in tables.shards.values() for ref in refs),
        *small_tables,
        *(update.figures for update in updates),
        files.write(layout.metrics_file(at.run, at.iteration), data),
    ]
    prefix = layout.iteration_folder(at.run, at.iteration) + "/"
    config = resources.config
    if resources.lease is not None:
        resources.lease.require()
        resources.lease.stop()  # it lies in the staging folder, which goes
    committed = commit_manifest(
        files,
        Manifest(
            run=at.run,
            iteration=at.iteration,
            config_sha256=config.sha256(),
            lineage_sha256=config.lineage_sha256(),
            code_version=code_version(),
            parent_sha256=at.parent_sha256,
            files={ref.path.removeprefix(prefix): ref for ref in written},
            policies={**_untouched(resources, at), **{update.policy: update.step for update in updates}},
            cursor=at.cursor,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            writer=new_writer(flow_run.name or "mgrpo"),
        ),
    )
    clear_staging(files, at.run, at.iteration)
    return committed


def _untouched(resources: RunResources, at: IterationRef) -> dict[str, PolicyStep]:
    """Steps of policies that no update was made for: frozen ones keep their version."""
    steps = {}
    for policy, version in at.versions.items():
        there = resources.version(policy, version)
        steps[policy] = PolicyStep(there.folder, version, version, there.sha256)
    return steps
