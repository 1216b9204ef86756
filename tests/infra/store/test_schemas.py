import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store.files import StoreFiles
from infra.store.schemas import ADVANTAGES, ALIGNMENT, QUERIES, REWARDS, TRAJECTORIES, TableSchema
from infra.store.tables import open_table, read_table, table_of, write_table
from mgrpo_core.errors import SchemaVersionError, TableIntegrityError

TABLES = (QUERIES, TRAJECTORIES, REWARDS, ALIGNMENT, ADVANTAGES)


def notes(version: int = 1, *columns: pa.Field) -> TableSchema:
    rid = pa.field("rid", pa.int64(), nullable=False)
    return TableSchema("notes", version, pa.schema([rid, *columns]))


def put(files: StoreFiles, path: str, schema: TableSchema, **columns: object) -> str:
    return write_table(files, path, schema, table_of(schema, columns)).path


@pytest.mark.parametrize("schema", TABLES, ids=lambda schema: schema.name)
def test_a_table_of_no_rows_has_every_column_with_its_type(schema, local_files):  # case D1
    columns = {name: [] for name in schema.columns.names}
    ref = write_table(local_files, "r/empty.parquet", schema, table_of(schema, columns))
    assert ref.rows == 0
    found = pq.read_schema(local_files.full("r/empty.parquet"))
    assert found.equals(schema.columns)
    assert read_table(local_files, ref.path, schema).schema.equals(schema.columns)


@pytest.mark.parametrize("schema", TABLES, ids=lambda schema: schema.name)
def test_no_column_of_any_table_has_an_inferred_type(schema):  # cases E1, E3
    def leaves(kind: pa.DataType) -> list[pa.DataType]:
        below = [kind.field(index).type for index in range(kind.num_fields)]
        return [leaf for one in below for leaf in leaves(one)] or [kind]

    assert not [f for f in schema.columns for leaf in leaves(f.type) if pa.types.is_null(leaf)]


def test_a_file_says_which_table_version_and_place_it_is_of(local_files):
    put(local_files, "r/iterations/00000003/notes.parquet", notes(2), rid=[1])
    metadata = pq.read_schema(local_files.full("r/iterations/00000003/notes.parquet")).metadata
    assert metadata == {
        b"mgrpo.table": b"notes",
        b"mgrpo.schema_version": b"2",
        b"mgrpo.path": b"r/iterations/00000003/notes.parquet",
    }


def test_a_column_of_nulls_keeps_its_declared_type(local_files):  # case E1
    schema = notes(1, pa.field("sub_error", pa.string()))
    paths = [
        put(local_files, "r/a.parquet", schema, rid=[1, 2], sub_error=[None, None]),
        put(local_files, "r/b.parquet", schema, rid=[3], sub_error=["timeout after 30s"]),
    ]
    assert read_table(local_files, paths, schema).column("sub_error").to_pylist() == [None, None, "timeout after 30s"]


def test_a_column_that_came_later_is_null_in_older_files(local_files):  # case E2
    newer = notes(2, pa.field("policy_version", pa.int64()))
    paths = [
        put(local_files, "r/a.parquet", notes(1), rid=[1]),
        put(local_files, "r/b.parquet", newer, rid=[2], policy_version=[7]),
    ]
    expected = [{"rid": 1, "policy_version": None}, {"rid": 2, "policy_version": 7}]
    assert read_table(local_files, paths, newer).to_pylist() == expected
    assert read_table(local_files, paths, newer, ["policy_version"]).to_pylist() == [
        {"policy_version": None},
        {"policy_version": 7},
    ]


def test_a_table_of_a_newer_version_is_refused_with_the_way_out(local_files):  # case E2
    put(local_files, "r/a.parquet", notes(3), rid=[1])
    with pytest.raises(SchemaVersionError, match=r"a.parquet: schema version 3 of 'notes', .* up to 2.*newer one"):
        read_table(local_files, "r/a.parquet", notes(2))


def test_a_required_column_that_is_missing_is_never_filled_with_null(local_files):  # case E2
    put(local_files, "r/a.parquet", notes(1), rid=[1])
    with pytest.raises(TableIntegrityError, match="required column 'reward' is missing"):
        read_table(local_files, "r/a.parquet", notes(2, pa.field("reward", pa.float64(), nullable=False)))


def test_a_column_of_another_type_is_refused(local_files):
    put(local_files, "r/a.parquet", notes(1, pa.field("x", pa.string())), rid=[1], x=["1"])
    with pytest.raises(TableIntegrityError, match="'x' is string, expected double"):
        read_table(local_files, "r/a.parquet", notes(1, pa.field("x", pa.float64())))


def test_another_table_under_this_name_is_refused(local_files):
    other = TableSchema("others", 1, notes().columns)
    put(local_files, "r/a.parquet", other, rid=[1])
    with pytest.raises(TableIntegrityError, match="holds the table 'others', expected 'notes'"):
        read_table(local_files, "r/a.parquet", notes())


@pytest.mark.parametrize("version", [b"", b"one", b"-1"])
def test_a_version_that_is_no_number_is_refused(local_files, version):
    schema = notes().columns.with_metadata({b"mgrpo.table": b"notes", b"mgrpo.schema_version": version})
    with local_files.writing("r/a.parquet") as file:
        pq.write_table(pa.table({"rid": [1]}, schema), file)
    with pytest.raises(TableIntegrityError, match="no number"):
        read_table(local_files, "r/a.parquet", notes())


def test_nulls_that_other_software_wrote_into_a_required_column_are_found(local_files):
    loose = pa.schema([pa.field("rid", pa.int64())], notes().arrow.metadata)
    with local_files.writing("r/a.parquet") as file:
        pq.write_table(pa.table({"rid": [1, None]}, loose), file)
    with pytest.raises(TableIntegrityError, match="1 nulls in the required column 'rid'"):
        read_table(local_files, "r/a.parquet", notes())


def test_files_without_our_metadata_are_refused(local_files):
    with local_files.writing("r/a.parquet") as file:
        pq.write_table(pa.table({"rid": [1]}, notes().columns), file)
    with pytest.raises(TableIntegrityError, match="holds the table"), open_table(local_files, "r/a.parquet", notes()):
        pass
