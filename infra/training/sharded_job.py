"""What the ranks of an update are told: one file, written by their starter."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from infra.training.orders import UpdateOrder
from mgrpo_core.config import RunConfig

_FILE = "job.json"


@dataclass(frozen=True, slots=True)
class ShardedJob:
    """An update to be shared by several processes of this machine.

    Attributes:
        store: URL, or an absolute folder.
        config: the one that the order names.
        order: which update.
        source: folder of the version that is updated, verified.
        target: an existing empty folder for the new version.
        reference: folder of the reference policy, verified; None where the loss has no KL term.
    """

    store: str
    config: RunConfig
    order: UpdateOrder
    source: Path
    target: Path
    reference: Path | None


def write_job(folder: Path, job: ShardedJob) -> None:
    (folder / _FILE).write_bytes(_AS_JSON.dump_json(job))


def read_job(folder: Path) -> ShardedJob:
    return _AS_JSON.validate_json((folder / _FILE).read_bytes())


_AS_JSON = TypeAdapter(ShardedJob)
