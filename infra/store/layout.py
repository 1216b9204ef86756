"""Every path of a store. No other place builds one; all are relative to the store's root, with forward slashes."""

import re
from urllib.parse import quote, unquote

from mgrpo_core.errors import ConfigError

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_IN_ITERATION = re.compile(r"[^/]+/iterations/\d{8,}(?=/)")


def run_folder(run: str) -> str:
    """Folder of a run. Names stay as they are ("007" is "007"): no partition syntax, nothing to guess types from.

    Raises: ConfigError for a name that would leave the store or that a file system or URL would change.
    """
    if not _RUN.fullmatch(run) or run.endswith("."):
        raise ConfigError(
            f"run name {run!r}: expected a letter or digit, then up to 63 of A-Z a-z 0-9 _ . - "
            "(no slash, no trailing dot). Give another name with --run."
        )
    return run


def encoded(name: str) -> str:
    """A name as one path segment: distinct names give distinct segments, none of which leaves its folder.

    Percent-encoding of everything but letters, digits, "_", "-"; "" and all-dot names included.
    """
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E") or "%"


def decoded(segment: str) -> str:
    """The name that `encoded` made `segment` of."""
    return "" if segment == "%" else unquote(segment)


def config_file(run: str, sha256: str) -> str:
    return f"{configs_folder(run)}/{sha256}.json"


def run_file(run: str) -> str:
    """Written once, when the run is created: name, first config, schema version."""
    return f"{run_folder(run)}/run.json"


def export_file(run: str) -> str:
    """What an export holds; beside a run that was imported in part, what there is of it."""
    return f"{run_folder(run)}/export.json"


def creation_folder(run: str) -> str:
    """Who writes the run's first files; empty once they are written."""
    return f"{run_folder(run)}/creation"


def configs_folder(run: str) -> str:
    return f"{run_folder(run)}/configs"


def iterations_folder(run: str) -> str:
    return f"{run_folder(run)}/iterations"


def iteration_folder(run: str, iteration: int) -> str:
    return f"{iterations_folder(run)}/{iteration:08d}"


def staging_folder(run: str, iteration: int) -> str:
    return f"{iteration_folder(run, iteration)}/staging"


def leases_folder(run: str, iteration: int) -> str:
    """Who computes the iteration."""
    return f"{staging_folder(run, iteration)}/leases"


def staged_group(run: str, iteration: int, position: int) -> str:
    return f"{staging_folder(run, iteration)}/{position:08d}.parquet"


def table_file(run: str, iteration: int, table: str) -> str:
    """A small table of an iteration: queries, rewards, alignment, advantages."""
    return f"{iteration_folder(run, iteration)}/{table}.parquet"


def trajectories_folder(run: str, iteration: int) -> str:
    return f"{iteration_folder(run, iteration)}/trajectories"


def trajectories_file(run: str, iteration: int, agent: str, shard: int) -> str:
    return f"{trajectories_folder(run, iteration)}/{encoded(agent)}-{shard:04d}.parquet"


def update_file(run: str, iteration: int, policy: str) -> str:
    return f"{iteration_folder(run, iteration)}/updates/{encoded(policy)}.json"


def metrics_file(run: str, iteration: int) -> str:
    return f"{iteration_folder(run, iteration)}/metrics.json"


def manifest_beside(path: str) -> str | None:
    """The manifest that seals a file of an iteration; None for a file outside any iteration."""
    found = _IN_ITERATION.match(path)
    return f"{found[0]}/manifest.json" if found else None


def manifest_file(run: str, iteration: int) -> str:
    return f"{iteration_folder(run, iteration)}/manifest.json"


def policies_folder(run: str) -> str:
    return f"{run_folder(run)}/policies"


def policy_folder(run: str, folder: str, version: int) -> str:
    return f"{policies_folder(run)}/{encoded(folder)}/{version:08d}"


def version_file(run: str, folder: str, version: int) -> str:
    """Written last: a version without it does not exist."""
    return f"{policy_folder(run, folder, version)}/version.json"


def aside_folder(run: str) -> str:
    """Where what a resume cannot use is moved; nothing in it is ever read or deleted."""
    return f"{run_folder(run)}/aside"


def import_folder(key: str) -> str:
    """Where an import waits until all of it is verified. No reader looks there: it is no run name."""
    return f".tmp-import-{key}"


def evaluations_folder(run: str) -> str:
    return f"{run_folder(run)}/evaluations"


def evaluation_file(run: str, after: int, name: str) -> str:
    """Held-out success after so many iterations; `name` is derived from how it was measured."""
    return f"{evaluations_folder(run)}/{after:08d}-{encoded(name)}.json"
