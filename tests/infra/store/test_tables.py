import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from infra.store import tables
from infra.store.files import StoreFiles
from infra.store.schemas import ALIGNMENT, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import read_table, stream_table, table_of, table_writer, write_table
from infra.store.trajectory_rows import trajectories_table
from mgrpo_core.errors import TableIntegrityError
from tests.infra.store.small_run import rollouts

SCORES = TableSchema(
    "scores",
    1,
    pa.schema(
        [
            pa.field("rid", pa.int64(), nullable=False),
            pa.field("reward", pa.float64()),
            pa.field("text", pa.string()),
            pa.field("seed", pa.int64()),
            pa.field("answers", pa.list_(pa.field("element", pa.string(), nullable=False))),
        ]
    ),
)


def scores(**columns: object) -> pa.Table:
    rows = len(next(iter(columns.values())))
    empty = {name: [None] * rows for name in SCORES.columns.names}
    return table_of(SCORES, {**empty, "rid": range(rows), **columns})


def read_back(files: StoreFiles, table: pa.Table) -> dict[str, list]:
    write_table(files, "r/scores.parquet", SCORES, table)
    return read_table(files, "r/scores.parquet", SCORES).to_pydict()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whole_numbers_and_fractions_are_doubles_in_any_order(local_files, order):  # case E5
    parts = [scores(reward=[1, 0]), scores(reward=[0.75])]
    paths = [write_table(local_files, f"r/{index}.parquet", SCORES, parts[index]).path for index in order]
    found = read_table(local_files, paths, SCORES, ["reward"])
    assert found.schema.field("reward").type == pa.float64()
    assert found.column("reward").to_pylist() == ([1.0, 0.0, 0.75] if order == (0, 1) else [0.75, 1.0, 0.0])


@pytest.mark.parametrize("rewards", [[True, 0.5], [0.5, np.True_], np.array([True])])
def test_a_bool_is_no_reward(rewards):  # case E5
    with pytest.raises(TableIntegrityError, match=r"scores\.reward: a bool_? among values of double"):
        scores(reward=rewards)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_number_that_is_none_is_refused_where_null_is_meant(reward, kind):  # case E19
    with pytest.raises(TableIntegrityError, match=r"scores\.reward: NaN or infinite\. Give None"):
        scores(reward=kind([0.5, reward]))


def test_filters_find_every_row_because_missing_is_null(local_files):  # case E19
    write_table(local_files, "r/scores.parquet", SCORES, scores(reward=[0.5, 0.5, None]))
    path = local_files.full("r/scores.parquet")
    assert pq.read_table(path, filters=pa.compute.field("reward").is_null()).column("rid").to_pylist() == [2]


def test_large_integers_beside_nulls_survive(local_files):  # case E18
    seeds = [9007199254740995, None, 7, 2**63 - 1]
    assert read_back(local_files, scores(seed=seeds))["seed"] == seeds


def test_no_answers_are_not_unknown_answers(local_files):  # case E3
    assert read_back(local_files, scores(answers=[[], None, ["a", ""]]))["answers"] == [[], None, ["a", ""]]


def test_text_without_a_utf8_form_is_refused_by_name(local_files):  # case E16
    with pytest.raises(TableIntegrityError, match=r"scores.text: .*surrogates"):
        scores(text=["ok \ud83d broken"])


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("rid", [1, None], "1 nulls in a required column"),
        ("seed", [2**63], "scores.seed"),
        ("seed", [1.5], "scores.seed: a float among values of int64"),
        ("seed", [True], "scores.seed: a bool among values of int64"),
        ("seed", np.array([1.5]), "scores.seed: a float64 among values of int64"),
        ("text", [5], "scores.text"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused_by_name(column, values, said):
    with pytest.raises(TableIntegrityError, match=said):
        scores(**{column: values})


def test_columns_are_given_exactly():
    with pytest.raises(TableIntegrityError, match="missing or unknown"):
        table_of(ALIGNMENT, {"agent": ["main"]})
    with pytest.raises(TableIntegrityError, match="rewrad"):
        table_of(ALIGNMENT, dict.fromkeys([*ALIGNMENT.columns.names, "rewrad"], ()))
    with pytest.raises(TableIntegrityError, match="one length"):
        scores(rid=[1, 2], reward=[0.5])


def test_a_column_that_the_table_has_not_is_not_read_in_silence(local_files):
    write_table(local_files, "r/scores.parquet", SCORES, scores(rid=[1]))
    with pytest.raises(TableIntegrityError, match=r"scores has no column \['rewrad'\]"):
        read_table(local_files, "r/scores.parquet", SCORES, ["rewrad"])


def test_the_same_rows_give_the_same_bytes(files):  # case E13
    table = trajectories_table([(0, one) for made in rollouts("r", 0, "q0") for one in made.trajectories])
    first = write_table(files, "r/t.parquet", TRAJECTORIES, table)
    data = files.read("r/t.parquet")
    assert write_table(files, "r/t.parquet", TRAJECTORIES, table) == first
    assert files.read("r/t.parquet") == data
    assert files.sha256("r/t.parquet") == (first.sha256, first.bytes)


def test_rows_come_back_in_the_order_that_they_were_written_over_all_shards(files):  # case A9
    order = np.random.default_rng(0).permutation(100)
    paths = [
        write_table(files, f"r/s-{shard:04d}.parquet", SCORES, scores(rid=order[shard * 25 : shard * 25 + 25])).path
        for shard in range(4)
    ]
    assert read_table(files, paths, SCORES, ["rid"]).column("rid").to_pylist() == order.tolist()


def test_row_groups_hold_what_the_limit_allows_even_where_rows_are_unequal(local_files, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 10_000)
    texts = ["a" * size for size in [10] * 200 + [9_000] * 5 + [10] * 200 + [30_000] + [10] * 3]
    with table_writer(local_files, "r/scores.parquet", SCORES) as writer:
        writer.write(scores(text=texts))
    file = pq.ParquetFile(local_files.full("r/scores.parquet"))
    sizes = [file.read_row_group(index).nbytes for index in range(file.num_row_groups)]
    rows = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    assert all(size <= 10_000 or count == 1 for size, count in zip(sizes, rows, strict=True)), (sizes, rows)
    assert sum(rows) == len(texts) == writer.ref.rows
    assert file.num_row_groups < 40
    assert read_table(local_files, "r/scores.parquet", SCORES, ["text"]).column("text").to_pylist() == texts


def test_many_small_writes_share_a_row_group(local_files):
    with table_writer(local_files, "r/scores.parquet", SCORES) as writer:
        for number in range(50):
            writer.write(scores(rid=[number]))
    file = pq.ParquetFile(local_files.full("r/scores.parquet"))
    assert (file.num_row_groups, file.metadata.num_rows) == (1, 50)


def test_a_table_is_read_a_row_group_at_a_time(local_files, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 2_000)
    write_table(local_files, "r/scores.parquet", SCORES, scores(text=["a" * 100] * 100))
    parts = list(stream_table(local_files, "r/scores.parquet", SCORES, ["rid"]))
    assert len(parts) > 3
    assert [rid for part in parts for rid in part.column("rid").to_pylist()] == list(range(100))


class Counting(MemoryFileSystem):
    """Counts the bytes that are read of it."""

    protocol = "counting"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    bytes_read = 0

    def _open(self, path, mode="rb", **kwargs):
        file = super()._open(path, mode, **kwargs)
        return CountedFile(file) if mode == "rb" else file


class CountedFile:
    def __init__(self, file) -> None:
        self._file = file
        file.seek(0)

    def read(self, *size):
        data = self._file.read(*size)
        Counting.bytes_read += len(data)
        return data

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


fsspec.register_implementation("counting", Counting, clobber=True)


def test_reading_outcomes_reads_no_tokens():
    files = StoreFiles("counting://store")
    group = rollouts("r", 0, "q0", calls=(1,) * 8, tokens=20_000)
    rows = [(0, one) for made in group for one in made.trajectories]
    ref = write_table(files, "r/t.parquet", TRAJECTORIES, trajectories_table(rows))
    assert ref.bytes > 1_000_000  # 16 trajectories x 20,000 tokens, of which ids and log-probs hardly compress

    def bytes_for(columns: list[str]) -> int:
        Counting.bytes_read = 0
        read_table(files, "r/t.parquet", TRAJECTORIES, columns)
        return Counting.bytes_read

    assert bytes_for(["trajectory_id", "status", "reply"]) < 0.05 * ref.bytes
    assert bytes_for(["token_ids", "loss_mask", "logprobs"]) > 0.9 * ref.bytes


def test_a_file_that_was_cut_off_is_named(files):  # case E11
    write_table(files, "r/scores.parquet", SCORES, scores(rid=[1, 2]))
    data = files.read("r/scores.parquet")
    for content in (data[: len(data) // 2], b"", b"PAR1"):
        files.write("r/cut.parquet", content)
        with pytest.raises(TableIntegrityError, match=r"cut\.parquet: not a whole Parquet file"):
            read_table(files, "r/cut.parquet", SCORES)
    assert read_table(files, "r/scores.parquet", SCORES).num_rows == 2


def test_a_byte_that_changed_inside_a_page_is_found(local_files):
    write_table(local_files, "r/scores.parquet", SCORES, scores(text=[f"row {row}" for row in range(1000)]))
    data = bytearray(local_files.read("r/scores.parquet"))
    data[200] ^= 1
    local_files.write("r/scores.parquet", bytes(data))
    with pytest.raises(TableIntegrityError, match=r"cannot be read|not a whole"):
        read_table(local_files, "r/scores.parquet", SCORES)


def test_a_missing_table_is_named(files):
    with pytest.raises(TableIntegrityError, match=r"r/none\.parquet: missing"):
        read_table(files, "r/none.parquet", SCORES)


def test_rewards_keep_graded_zero_and_never_graded_apart(local_files):  # cases A5, A7
    columns = {name: ["x", "y"] for name in REWARDS.columns.names} | {
        "query_position": [0, 0],
        "rollout_index": [0, 1],
        "call_index": [0, 0],
        "status": ["scored", "failed"],
        "reason": [None, "judge timed out"],
        **{field.name: [0.0, None] for field in REWARDS.columns if pa.types.is_floating(field.type)},
        "format_weight": [0.1, 0.1],
    }
    write_table(local_files, "r/rewards.parquet", REWARDS, table_of(REWARDS, columns))
    assert read_table(local_files, "r/rewards.parquet", REWARDS).column("reward").to_pylist() == [0.0, None]


def test_free_form_arguments_keep_their_keys_and_their_order():  # case E6
    raw = ['{"q":"weather"}', '{"expr":"1+2","digits":3}', '{"n":1}', '{"n":"one"}', "{}", '{"b":1, "a":2}']
    files = StoreFiles("memory://arguments")
    assert read_back(files, scores(text=raw))["text"] == raw
    assert json.loads(raw[3]) == {"n": "one"}


def test_a_writer_whose_block_fails_leaves_no_table(local_files):
    def fail() -> None:
        with table_writer(local_files, "r/scores.parquet", SCORES) as writer:
            writer.write(scores(rid=[1]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(Path(local_files.full("r")).iterdir())


def test_copies_keep_the_invocation_they_are_of_and_empty_slots_stay_empty(local_files):  # case D3
    # d = 2; rollout A makes one call, B two, C none: A's call fills both slots, each counting half; C's are masked.
    slots = {
        "agent": ["searcher"] * 6,
        "query_id": ["q"] * 6,
        "rollout_index": [0, 0, 1, 1, 2, 2],
        "slot": [0, 1] * 3,
        "trajectory_id": ["a", "a", "b0", "b1", None, None],
        "copy_index": [0, 1, 0, 0, 0, 0],
        "weight": [0.5, 0.5, 1.0, 1.0, 0.0, 0.0],
    }
    write_table(local_files, "r/alignment.parquet", ALIGNMENT, table_of(ALIGNMENT, slots))
    assert read_table(local_files, "r/alignment.parquet", ALIGNMENT).to_pydict() == slots
