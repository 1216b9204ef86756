"""Stage: engines load the committed versions, and prove it."""

import asyncio

from infra.resources import RunResources
from infra.store.manifests import CommittedManifest
from tasks.stage import stage


@stage
async def publish_policy(resources: RunResources, committed: CommittedManifest) -> dict[str, float]:
    """Have every policy's engine serve its committed version; returns `publish/<policy>/…` of those that were loaded.

    Raises: PolicyServerError where a server cannot be brought to its version, or its log-probs of a probe are not the
        trainer's. The iteration stands, it is committed: the next start has the servers load the version again.
    """
    versions = {name: step.to_version for name, step in committed.manifest.policies.items()}
    return await asyncio.to_thread(resources.serve, versions)
