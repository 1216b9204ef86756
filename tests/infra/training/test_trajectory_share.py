"""Who of an update's ranks reads which rows."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from infra.store.files import StoreFiles
from infra.training.trajectory_share import training_trajectories, trajectory_share
from mgrpo_core.errors import TableIntegrityError
from tests.infra.training.stored_update import StoredUpdate, config_of, store_run, store_update

LENGTHS = (8, 20, 9, 30, 11, 14, 8, 8)  # 108 tokens


@pytest.fixture
def stored(tmp_path: Path) -> StoredUpdate:
    files, settings = StoreFiles(str(tmp_path / "store")), config_of(2)
    store_run(files, settings, tmp_path)
    return store_update(files, settings, LENGTHS, [1.0] * len(LENGTHS))


def share(stored: StoredUpdate, rank: int, ranks: int):
    return trajectory_share(stored.files, stored.config, stored.order, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_every_trajectory_is_on_one_rank_as_it_is_in_the_table(stored, ranks):
    everything = training_trajectories(stored.files, stored.config, stored.order)
    shares = [share(stored, rank, ranks) for rank in range(ranks)]
    divided = [one for part in shares for one in part.trajectories]
    assert [one.trajectory_id for one in divided] == [one.trajectory_id for one in everything]
    for mine, theirs in zip(divided, everything, strict=True):
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert np.array_equal(mine.sampler_logprobs, theirs.sampler_logprobs, equal_nan=True)
        assert (mine.advantage, mine.weight) == (theirs.advantage, theirs.weight)
    assert all(part.all_ids == shares[0].all_ids for part in shares)
    assert list(shares[0].all_ids) == [one.trajectory_id for one in everything]


def test_ranks_have_even_tokens_up_to_a_trajectory(stored):
    # middles 4, 18, 32.5, 52, 72.5, 85, 96, 104 of 108: the first four are below 54
    tokens = [[len(one.token_ids) for one in share(stored, rank, 2).trajectories] for rank in range(2)]
    assert tokens == [[8, 20, 9, 30], [11, 14, 8, 8]]


def test_a_rank_reads_no_tokens_of_another_ranks_row_groups(stored):
    path = Path(stored.files.full(stored.order.trajectories["main"][0].path))
    described = pq.ParquetFile(path).metadata
    last = described.row_group(described.num_row_groups - 1)
    tokens = next(
        last.column(index) for index in range(last.num_columns) if "token_ids" in last.column(index).path_in_schema
    )
    data = bytearray(path.read_bytes())
    start = tokens.dictionary_page_offset or tokens.data_page_offset
    for place in range(start, start + tokens.total_compressed_size):
        data[place] ^= 0xFF
    path.write_bytes(data)

    assert len(share(stored, 0, 2).trajectories) == 4
    with pytest.raises(TableIntegrityError, match="row group 7 cannot be read"):
        share(stored, 1, 2)


def test_rows_without_weight_or_sampled_token_are_on_no_rank(tmp_path):
    files, settings = StoreFiles(str(tmp_path / "store")), config_of(2)
    store_run(files, settings, tmp_path)
    stored = store_update(files, settings, [3, 8, 8], [1.0, 1.0, 1.0])  # three tokens of prompt: nothing sampled
    assert len(share(stored, 0, 1).trajectories) == 2
    assert len(share(stored, 0, 1).all_ids) == 2
