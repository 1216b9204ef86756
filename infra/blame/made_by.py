"""Which iteration made a policy version."""

from infra.store.manifests import PolicyStep, newest_committed, read_manifest
from infra.store.runs import StoredRun
from mgrpo_core.errors import ConfigError


def iteration_that_made(run: StoredRun, policy: str, version: int | None) -> int:
    """The iteration whose update made a version, in O(log n) manifests: versions rise by at most 1 an iteration.

    Args:
        run: where it is.
        policy: name of it.
        version: of the policy; None = its newest.

    Raises: ConfigError if there is no such policy or version, or no iteration made it.
    """
    newest = newest_committed(run.files, run.name)
    if newest < 0:
        raise ConfigError(f"run {run.name!r} has no committed iteration: nothing has moved a policy yet.")
    last = _step(run, newest, policy)
    if last is None:
        there = ", ".join(sorted(read_manifest(run.files, run.name, newest).manifest.policies))
        raise ConfigError(f"run {run.name!r} has no policy {policy!r}. It has {there}.")
    wanted = last.to_version if version is None else version
    if wanted == 0:
        raise ConfigError(
            f"version 0 of policy {policy!r} is what the run started from; no iteration made it. "
            f"Newest: version {last.to_version}."
        )
    if wanted > last.to_version:
        raise ConfigError(f"policy {policy!r} has versions 0 to {last.to_version}, not {wanted}.")
    low, high = wanted - 1, newest  # an iteration makes one version at most, so none before wanted - 1 has it
    while low < high:
        middle = (low + high) // 2
        step = _step(run, middle, policy)
        if step is not None and step.to_version >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def _step(run: StoredRun, iteration: int, policy: str) -> PolicyStep | None:
    return read_manifest(run.files, run.name, iteration).manifest.policies.get(policy)
