"""The trajectories that an update trains on: all of them, or one rank's share of their rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from infra.store.files import StoreFiles
from infra.store.schemas import ADVANTAGES, TRAJECTORIES
from infra.store.tables import open_table, read_table, stream_table
from infra.store.trajectory_rows import list_arrays
from infra.training.orders import UpdateOrder
from mgrpo_core.config import RunConfig
from mgrpo_core.errors import TableIntegrityError
from mgrpo_core.update.training_trajectory import TrainingTrajectory

_STREAM = ("trajectory_id", "token_ids", "loss_mask", "logprobs", "segment_starts", "temperature")
_CREDIT = ("trajectory_id", "agent", "advantage", "weight", "included")
_SIZES = ("trajectory_id", "tokens", "sampled_tokens")

_Credit = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank trains on, and the ids of what all of them do."""

    trajectories: Sequence[TrainingTrajectory]
    all_ids: Sequence[str]


def training_trajectories(files: StoreFiles, config: RunConfig, order: UpdateOrder) -> list[TrainingTrajectory]:
    """Rows of the policy's trainable agents that carry signal. No other agent's tokens are read."""
    credit = _credit(files, config, order)
    return [
        one
        for path in _paths(config, order)
        for group in stream_table(files, path, TRAJECTORIES, _STREAM)
        for one in _trajectories_of(group, credit)
    ]


def trajectory_share(files: StoreFiles, config: RunConfig, order: UpdateOrder, rank: int, ranks: int) -> Share:
    """The rows of one rank. It reads the tokens of no row group but those that hold its own.

    The rows that take part, in the order of the tables, are cut where the ranks' tokens are even: a row is for the rank
    on whose part its middle falls. So a rank's rows lie together, and two ranks share at most a row group.
    """
    credit = _credit(files, config, order)
    rows = [row for path in _paths(config, order) for row in _sizes(files, path, credit)]
    owner = _owner_of_each([row.tokens for row in rows], ranks)
    own: dict[str, dict[int, dict[str, Mapping[str, Any]]]] = {}
    for row, owned_by in zip(rows, owner, strict=True):
        if owned_by == rank:
            wanted = own.setdefault(row.path, {}).setdefault(row.group, {})
            wanted[row.trajectory_id] = credit[row.trajectory_id]
    trajectories = [
        one
        for path, wanted in own.items()
        for group, part in _groups(files, path, _STREAM, wanted)
        for one in _trajectories_of(part, wanted[group])
    ]
    return Share(trajectories, [row.trajectory_id for row in rows])


@dataclass(frozen=True, slots=True)
class _Row:
    path: str
    group: int
    trajectory_id: str
    tokens: int


def _owner_of_each(tokens: Sequence[int], ranks: int) -> list[int]:
    """The rank of each row: that on whose even part of the tokens the row's middle falls."""
    ends = np.cumsum(tokens, dtype=np.int64)
    middle = 2 * ends - np.array(tokens, dtype=np.int64)  # twice the middle: whole numbers have no rounding
    return [int(one) * ranks // (2 * int(ends[-1])) for one in middle]


def _paths(config: RunConfig, order: UpdateOrder) -> list[str]:
    return [ref.path for agent in config.agents_of(order.policy) for ref in order.trajectories[agent]]


def _credit(files: StoreFiles, config: RunConfig, order: UpdateOrder) -> _Credit:
    """Advantage and weight of what enters the loss, by trajectory."""
    agents = config.agents_of(order.policy)
    return {
        row["trajectory_id"]: row
        for row in read_table(files, order.advantages.path, ADVANTAGES, _CREDIT).to_pylist()
        if row["included"] and row["agent"] in agents
    }


def _sizes(files: StoreFiles, path: str, credit: _Credit) -> Iterator[_Row]:
    """The rows that take part: they have a weight and a sampled token."""
    for group, part in _groups(files, path, _SIZES):
        for row in part.to_pylist():
            one = row["trajectory_id"]
            if one in credit and credit[one]["weight"] > 0 and row["sampled_tokens"] > 0:
                yield _Row(path, group, one, row["tokens"])


def _groups(
    files: StoreFiles, path: str, columns: Sequence[str], wanted: Mapping[int, object] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Row groups of a table with their numbers; of the others nothing is read."""
    with open_table(files, path, TRAJECTORIES) as parquet:
        for group in range(parquet.num_row_groups) if wanted is None else sorted(wanted):
            try:
                yield group, parquet.read_row_group(group, columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise TableIntegrityError(
                    f"{files.uri(path)}: row group {group} cannot be read ({error}). Restore the file."
                ) from error


def _trajectories_of(group: pa.Table, credit: _Credit) -> Iterator[TrainingTrajectory]:
    """The rows of a row group that have credit."""
    ids = group.column("trajectory_id").to_pylist()
    chosen = [index for index, one in enumerate(ids) if one in credit]
    rows = group.take(np.array(chosen, dtype=np.int64))  # typed: an empty list would be of type null
    tokens, masks, logprobs, starts = (list_arrays(rows.column(name)) for name in _STREAM[1:5])
    kept = rows.column("trajectory_id").to_pylist()
    temperatures = rows.column("temperature").to_pylist()
    for index, trajectory_id in enumerate(kept):
        yield TrainingTrajectory(
            trajectory_id=trajectory_id,
            token_ids=tokens[index],
            loss_mask=masks[index].astype(np.bool_),
            sampler_logprobs=logprobs[index].astype(np.float32),
            segment_starts=tuple(starts[index].tolist()),
            temperature=temperatures[index],
            advantage=credit[trajectory_id]["advantage"],
            weight=credit[trajectory_id]["weight"],
        )
