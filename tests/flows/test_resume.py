"""Two iterations and a resume for two more equal four straight (cases H1, H3, H6), on the real flow and policies."""

import hashlib
from pathlib import Path

from flows.load_config import load_config
from flows.train_run import train_run
from infra.store.manifests import read_manifest
from infra.store.runs import open_store, require_run
from infra.store.verify import verify_run

SMALL = (
    "rollout.queries_per_iteration=2",
    "rollout.rollouts_per_query=4",
    "evaluation.every=0",
    "tracking.mlflow=false",
    "execution.threads=1",
)
# Not the trajectories: the last bit of a log-prob depends on what else was in the engine's batch.
TABLES = ("queries", "rewards", "alignment", "advantages")


async def train(store: Path, iterations: int) -> None:
    config = load_config("quickstart", [*SMALL, f"iterations={iterations}"])
    await train_run(config, run="r", store=str(store), quiet=True)


def weights(store: Path, policy: str) -> dict[str, str]:
    found = sorted((store / "r" / "policies" / policy).glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


async def test_two_and_two_iterations_equal_four_bit_for_bit(prefect_server: str, tmp_path: Path) -> None:
    await train(tmp_path / "straight", 4)
    await train(tmp_path / "resumed", 2)
    await train(tmp_path / "resumed", 4)
    straight, resumed = (open_store(str(tmp_path / name)) for name in ("straight", "resumed"))
    for policy in ("main", "sub"):
        assert weights(tmp_path / "straight", policy) == weights(tmp_path / "resumed", policy)
        assert len(weights(tmp_path / "straight", policy)) > 1
    for iteration in range(4):
        one, other = (read_manifest(files, "r", iteration).manifest for files in (straight, resumed))
        assert one.cursor == other.cursor
        for table in TABLES:
            assert one.files[f"{table}.parquet"].sha256 == other.files[f"{table}.parquet"].sha256, (iteration, table)
    assert verify_run(require_run(resumed, "r")).sound
