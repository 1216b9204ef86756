"""Which policy versions sampled an iteration's trajectories: older ones, where it was rolled out ahead."""

from collections.abc import Sequence

from infra.store.files import StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.tables import read_table


def versions_that_sampled(files: StoreFiles, paths: Sequence[str], policy: str) -> list[int]:
    """Versions of a policy, oldest first.

    Args:
        files: the store.
        paths: trajectory tables, of any agents.
        policy: rows of others are left out, and rows without a turn.
    """
    rows = read_table(files, paths, TRAJECTORIES, ["policy", "policy_version"]).to_pylist()
    return sorted({row["policy_version"] for row in rows if row["policy"] == policy} - {None})
