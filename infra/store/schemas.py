"""The tables of a store: explicit, versioned, nothing inferred from data.

A version is raised when a column is added (nullable: older files read as null) or its meaning changes (older files are
then converted by their reader). Text is UTF-8, a missing number is null and never NaN.
"""

from dataclasses import dataclass

import pyarrow as pa

from mgrpo_core.errors import SchemaVersionError, TableIntegrityError

_TABLE, _VERSION, _PATH = b"mgrpo.table", b"mgrpo.schema_version", b"mgrpo.path"


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table's columns, and their version."""

    name: str
    version: int
    columns: pa.Schema

    @property
    def arrow(self) -> pa.Schema:
        """The columns with name and version in the metadata, as written to files."""
        return self.columns.with_metadata({_TABLE: self.name.encode(), _VERSION: str(self.version).encode()})

    def arrow_at(self, path: str) -> pa.Schema:
        """The same, and which file of the store this is (run and iteration are in its path)."""
        schema = self.arrow
        return schema.with_metadata({**schema.metadata, _PATH: path.encode()})

    def check(self, found: pa.Schema, where: str) -> None:
        """Accept a file's schema, of this version or an older one.

        Raises:
            SchemaVersionError: it was written by a newer mgrpo.
            TableIntegrityError: it is another table, a required column is missing, or a column has another type.
        """
        metadata = found.metadata or {}
        name = metadata.get(_TABLE, b"?").decode()
        if name != self.name:
            raise TableIntegrityError(f"{where}: holds the table {name!r}, expected {self.name!r}. Restore the file.")
        digits = metadata.get(_VERSION, b"").decode()
        if not digits.isdecimal():
            raise TableIntegrityError(f"{where}: its schema version is {digits!r}, no number. Restore the file.")
        version = int(digits)
        if version > self.version:
            raise SchemaVersionError(
                f"{where}: schema version {version} of {self.name!r}, this mgrpo reads up to {self.version}. "
                "Install the mgrpo that wrote it, or a newer one."
            )
        for field in self.columns:
            index = found.get_field_index(field.name)
            if index < 0:
                if field.nullable:
                    continue
                raise TableIntegrityError(f"{where}: the required column {field.name!r} is missing. Restore the file.")
            if found.field(index).type != field.type:
                raise TableIntegrityError(
                    f"{where}: column {field.name!r} is {found.field(index).type}, expected {field.type}. "
                    "Restore the file."
                )


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


def _optional(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=True)


def _list(of: pa.DataType, *, nullable_items: bool = False) -> pa.DataType:
    return pa.list_(pa.field("element", of, nullable=nullable_items))


TURN = pa.struct(
    [
        _required("start", pa.int32()),
        _required("stop", pa.int32()),
        _required("finish_reason", pa.string()),
        _required("policy_version", pa.int64()),
        _required("seed", pa.int64()),
        _required("action", pa.string()),
        _optional("action_name", pa.string()),
        _optional("arguments_json", pa.string()),
        _optional("error", pa.string()),
        _required("observation_tokens", pa.int32()),
        _required("observation_chars", pa.int64()),
        _required("observation_cut", pa.bool_()),
    ]
)
MESSAGE = pa.struct([_required("role", pa.string()), _required("content", pa.string()), _optional("name", pa.string())])

QUERIES = TableSchema(
    "queries",
    1,
    pa.schema(
        [
            _required("position", pa.int32()),
            _required("query_id", pa.string()),
            _required("question", pa.string()),
            _required("answers", _list(pa.string())),
            _required("metadata_json", pa.string()),
            _required("epoch", pa.int64()),
        ]
    ),
)

TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs")
"""Nearly all of a trajectory table's bytes. Read only where tokens are wanted."""

TRAJECTORIES = TableSchema(
    "trajectories",
    1,
    pa.schema(
        [
            _required("trajectory_id", pa.string()),
            _optional("parent_id", pa.string()),
            _required("run", pa.string()),
            _required("iteration", pa.int64()),
            _required("query_position", pa.int32()),
            _required("query_id", pa.string()),
            _required("rollout_index", pa.int32()),
            _required("agent", pa.string()),
            _required("agent_path", pa.string()),
            _required("depth", pa.int32()),
            _required("call_index", pa.int32()),
            _required("policy", pa.string()),
            _optional("policy_version", pa.int64()),  # of the first turn; null without a turn
            _required("task", pa.string()),
            _optional("reply", pa.string()),
            _required("status", pa.string()),
            _required("stop_reason", pa.string()),
            _optional("failure", pa.string()),
            _required("temperature", pa.float64()),
            _required("tokens", pa.int32()),
            _required("sampled_tokens", pa.int32()),
            _required("text_repaired", pa.bool_()),  # a lone surrogate became U+FFFD; the ids are as sampled
            _required("segment_starts", _list(pa.int32())),
            _required("turns", _list(TURN)),
            _required("messages", _list(MESSAGE)),
            _required("token_ids", _list(pa.int32())),
            _required("loss_mask", _list(pa.bool_())),
            _required("logprobs", _list(pa.float32(), nullable_items=True)),
        ]
    ),
)

REWARDS = TableSchema(
    "rewards",
    1,
    pa.schema(
        [
            _required("trajectory_id", pa.string()),
            _optional("parent_id", pa.string()),
            _required("agent", pa.string()),
            _required("query_position", pa.int32()),
            _required("query_id", pa.string()),
            _required("rollout_index", pa.int32()),
            _required("agent_path", pa.string()),
            _required("call_index", pa.int32()),
            _required("status", pa.string()),  # scored | failed | absent
            _optional("reason", pa.string()),
            _optional("reward", pa.float64()),
            _optional("format", pa.float64()),
            _optional("correct", pa.float64()),
            _optional("main_correct", pa.float64()),
            _optional("expert", pa.float64()),
            _required("format_weight", pa.float64()),
            _optional("correct_weight", pa.float64()),
            _optional("main_correct_weight", pa.float64()),
            _optional("expert_weight", pa.float64()),
            _optional("verifier", pa.string()),
            _optional("judge_version", pa.string()),
        ]
    ),
)

ALIGNMENT = TableSchema(
    "alignment",
    1,
    pa.schema(
        [
            _required("agent", pa.string()),
            _required("query_id", pa.string()),
            _required("rollout_index", pa.int32()),
            _required("slot", pa.int32()),
            _optional("trajectory_id", pa.string()),  # null: nothing to fill the slot with
            _required("copy_index", pa.int32()),
            _required("weight", pa.float64()),
        ]
    ),
)

ADVANTAGES = TableSchema(
    "advantages",
    1,
    pa.schema(
        [
            _required("trajectory_id", pa.string()),
            _required("agent", pa.string()),
            _required("policy", pa.string()),
            _required("query_id", pa.string()),
            _optional("reward", pa.float64()),
            _required("weight", pa.float64()),
            _required("advantage", pa.float64()),
            _optional("group_mean", pa.float64()),
            _optional("group_std", pa.float64()),
            _required("group_size", pa.int32()),
            _required("included", pa.bool_()),
            _optional("excluded_reason", pa.string()),
        ]
    ),
)
