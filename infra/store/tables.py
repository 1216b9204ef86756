"""Parquet tables of a store: written as streams under a temporary name, read by named columns."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.files import FileRef, StoreFiles
from infra.store.schemas import TableSchema
from mgrpo_core.errors import TableIntegrityError

ROW_GROUP_BYTES = 64 << 20
FILE_BYTES = 512 << 20
_OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}


def table_of(schema: TableSchema, columns: Mapping[str, Any]) -> pa.Table:
    """A table from one sequence or array a column, converted by the schema alone.

    Raises:
        TableIntegrityError: a column is missing or unknown, or a value does not fit its column: text with no UTF-8
            form, a bool where a number is meant, a fraction where a whole one is, NaN or infinity where null is meant,
            null in a required column.
    """
    if set(columns) != set(schema.columns.names):
        raise TableIntegrityError(
            f"{schema.name}: columns {sorted(set(columns) ^ set(schema.columns.names))} are missing or unknown. "
            f"Give exactly {schema.columns.names}."
        )
    arrays = []
    for field in schema.columns:
        values = columns[field.name]
        if (stranger := _stranger(field.type, values)) is not None:
            raise TableIntegrityError(
                f"{schema.name}.{field.name}: a {stranger} among values of {field.type}. Convert it on purpose."
            )
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
            array.validate()
        except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
            raise TableIntegrityError(f"{schema.name}.{field.name}: {error}. Expected {field.type}.") from error
        if not field.nullable and array.null_count:
            raise TableIntegrityError(f"{schema.name}.{field.name}: {array.null_count} nulls in a required column.")
        if pa.types.is_floating(field.type) and not np.isfinite(array.drop_null().to_numpy()).all():
            # Parquet's min and max leave NaN out: a filtered read would skip the row without a word.
            raise TableIntegrityError(
                f"{schema.name}.{field.name}: NaN or infinite. Give None where there is no number."
            )
        arrays.append(array)
    try:
        return pa.Table.from_arrays(arrays, schema=schema.arrow)
    except pa.ArrowException as error:
        raise TableIntegrityError(f"{schema.name}: {error}. Give columns of one length.") from error


def _stranger(type_: pa.DataType, values: Any) -> str | None:
    """What Arrow would convert without a word: a bool to a number, 1.5 to 1."""
    if pa.types.is_floating(type_):
        refused: tuple[type, ...] = (bool, np.bool_)
    elif pa.types.is_integer(type_):
        refused = (bool, np.bool_, float, np.floating)
    else:
        return None
    if isinstance(values, np.ndarray):
        return str(values.dtype) if issubclass(values.dtype.type, refused) else None
    return next((type(value).__name__ for value in values if isinstance(value, refused)), None)


def write_table(files: StoreFiles, path: str, schema: TableSchema, table: pa.Table) -> FileRef:
    """Write a whole table; the same rows give the same bytes.

    Raises:
        AlreadyCommittedError: the table's iteration is committed; its files are never replaced.
        StoreNotWritableError: no space, no permission.
    """
    with table_writer(files, path, schema) as writer:
        writer.write(table)
    return writer.ref


class TableWriter:
    """Rows in, row groups out. `ref` is set when the writer's block has ended well."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self.rows = 0
        self.bytes = 0  # of the rows in memory: what bounds a file
        self.ref: FileRef

    def write(self, table: pa.Table) -> None:
        """Add rows; a row group is written when the next rows would make it too large."""
        self.rows += table.num_rows
        self.bytes += table.nbytes
        for part in _parts(table, ROW_GROUP_BYTES):
            if self._waiting_bytes + part.nbytes > ROW_GROUP_BYTES:
                self.flush()
            self._waiting.append(part)
            self._waiting_bytes += part.nbytes

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self._waiting:
            table = pa.concat_tables(self._waiting)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._waiting, self._waiting_bytes = [], 0


def _parts(table: pa.Table, limit: int) -> Iterator[pa.Table]:
    """Slices of at most `limit` bytes in memory, or of one row."""
    if table.nbytes <= limit or table.num_rows <= 1:
        yield table
        return
    half = table.num_rows // 2
    yield from _parts(table.slice(0, half), limit)
    yield from _parts(table.slice(half), limit)


@contextmanager
def table_writer(files: StoreFiles, path: str, schema: TableSchema) -> Iterator[TableWriter]:
    """A writer whose file takes its place when the block ends well. Without rows it has the whole schema.

    Raises:
        AlreadyCommittedError: the table's iteration is committed; its files are never replaced.
    """
    with files.writing(path) as file, pq.ParquetWriter(file, schema.arrow_at(path), **_OPTIONS) as parquet:
        writer = TableWriter(parquet)
        yield writer
        writer.flush()
    writer.ref = FileRef(path, file.sha256, file.bytes, writer.rows)


@contextmanager
def open_table(files: StoreFiles, path: str, schema: TableSchema) -> Iterator[pq.ParquetFile]:
    """A table's file, its schema checked.

    Raises:
        TableIntegrityError: missing, cut off, not Parquet, or another table.
        SchemaVersionError: written by a newer mgrpo.
    """
    try:
        handle = files.open(path)
    except FileNotFoundError as error:
        raise TableIntegrityError(f"{files.uri(path)}: missing. Restore it, or run the iteration again.") from error
    with handle:
        try:
            parquet = pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=not files.is_local)
        except (pa.ArrowException, OSError) as error:
            raise TableIntegrityError(f"{files.uri(path)}: not a whole Parquet file ({error}). Restore it.") from error
        schema.check(parquet.schema_arrow, files.uri(path))
        yield parquet


def read_table(
    files: StoreFiles, paths: str | Sequence[str], schema: TableSchema, columns: Sequence[str] | None = None
) -> pa.Table:
    """Named columns of one table, all its shards; columns that an older version lacks are null.

    Args:
        files: the store.
        paths: file or shards, in order.
        schema: what the table is.
        columns: None = all. Name what you need: token columns are nearly all of a trajectory table.
    """
    shards = [paths] if isinstance(paths, str) else list(paths)
    fields = _fields(schema, columns)
    parts = [pa.Table.from_batches([], pa.schema(fields))]
    for path in shards:
        parts.extend(table for table in stream_table(files, path, schema, columns))
    return pa.concat_tables(parts)


def stream_table(
    files: StoreFiles,
    path: str,
    schema: TableSchema,
    columns: Sequence[str] | None = None,
    *,
    holding: tuple[str, Any] | None = None,
) -> Iterator[pa.Table]:
    """The same, a row group at a time.

    Args:
        files: the store.
        path: the file.
        schema: what the table is.
        columns: None = all.
        holding: a required column and a value: row groups that cannot hold it, by their statistics, are not read.
    """
    fields = _fields(schema, columns)
    with open_table(files, path, schema) as parquet:
        there = set(parquet.schema_arrow.names)
        names = [field.name for field in fields if field.name in there]
        for group in range(parquet.num_row_groups):
            if holding is not None and not _may_hold(parquet, group, *holding):
                continue
            try:
                read = parquet.read_row_group(group, columns=names)
            except (pa.ArrowException, OSError) as error:
                raise TableIntegrityError(
                    f"{files.uri(path)}: row group {group} cannot be read ({error}). Restore the file."
                ) from error
            arrays = [
                read.column(field.name) if field.name in there else pa.nulls(read.num_rows, field.type)
                for field in fields
            ]
            for field, array in zip(fields, arrays, strict=True):
                if not field.nullable and array.null_count:
                    raise TableIntegrityError(
                        f"{files.uri(path)}: {array.null_count} nulls in the required column {field.name!r}. "
                        "Restore the file."
                    )
            yield pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _may_hold(parquet: pq.ParquetFile, group: int, column: str, value: Any) -> bool:
    row_group = parquet.metadata.row_group(group)
    leaves = (row_group.column(leaf) for leaf in range(row_group.num_columns))
    statistics = next(leaf.statistics for leaf in leaves if leaf.path_in_schema == column)
    return statistics is None or not statistics.has_min_max or statistics.min <= value <= statistics.max


def _fields(schema: TableSchema, columns: Sequence[str] | None) -> list[pa.Field]:
    unknown = set(columns or ()) - set(schema.columns.names)
    if unknown:
        raise TableIntegrityError(
            f"{schema.name} has no column {sorted(unknown)}. It has {', '.join(schema.columns.names)}."
        )
    return [field for field in schema.columns if columns is None or field.name in columns]
