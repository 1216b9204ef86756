"""What an export holds: which iterations of a run, whether its policies, and every file by hash."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from infra.store import layout
from infra.store.disk import TEMPORARY
from infra.store.files import FileRef, StoreFiles
from mgrpo_core.errors import ConfigError, SchemaVersionError, TableIntegrityError

EXPORT_VERSION = 1
MOST_RECORD_BYTES = 256 << 20
"""A record names each file in some 200 bytes: this is a million of them."""

_HASH = re.compile(r"[0-9a-f]{64}")
_FOLDERS = ("configs", "iterations", "policies", "evaluations")


@dataclass(frozen=True)
class ExportRecord:
    """A run's export.

    Attributes:
        iterations: those that are in it, ascending.
        policies: whether the versions that replaying these needs are in it.
        files: by name below the run's folder; `FileRef.path` is from the store's root, as everywhere.
    """

    run: str
    iterations: tuple[int, ...]
    policies: bool
    files: Mapping[str, FileRef]

    @cached_property
    def whole(self) -> bool:
        """Whether it is a run in itself, from iteration 0 on and with its policies: it can go on."""
        return self.policies and self.iterations == tuple(range(len(self.iterations)))

    @property
    def total_bytes(self) -> int:
        """Of all its files, as declared."""
        return sum(ref.bytes for ref in self.files.values())

    def copying_order(self) -> list[FileRef]:
        """Tables before the manifests that seal them, and `run.json`, which makes them a run, last."""

        def rank(name: str) -> int:
            return 2 if name == "run.json" else int(name.endswith(("/manifest.json", "/version.json")))

        return [self.files[name] for name in sorted(self.files, key=lambda name: (rank(name), name))]

    def links_left_out(self) -> tuple[int, ...]:
        """Iterations of the export whose one before is not in it."""
        there = set(self.iterations)
        return tuple(one for one in self.iterations if one and one - 1 not in there)

    def left_out(self) -> tuple[str, ...]:
        """What a reader will not find here, in words."""
        found = [
            f"iteration {one - 1}, so the link of iteration {one} to it was not checked"
            for one in self.links_left_out()
        ]
        return (*found, *(() if self.policies else ("the policy versions",)))

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same export gives the same bytes."""
        raw = {
            "schema_version": EXPORT_VERSION,
            "run": self.run,
            "iterations": list(self.iterations),
            "policies": self.policies,
            "files": {name: {"sha256": ref.sha256, "bytes": ref.bytes} for name, ref in self.files.items()},
        }
        return (json.dumps(raw, sort_keys=True, indent=1) + "\n").encode()


def parse_record(data: bytes, where: str) -> ExportRecord:
    """A record, every name and number in it checked: it comes from elsewhere.

    Raises:
        TableIntegrityError: it is none, or names what no export names, such as a file outside the run.
        SchemaVersionError: written by a newer mgrpo.
    """
    try:
        raw = json.loads(data)
        version = int(raw["schema_version"])
        if version > EXPORT_VERSION:
            raise SchemaVersionError(
                f"{where}: export version {version}, this mgrpo reads up to {EXPORT_VERSION}. Install a newer mgrpo."
            )
        run = layout.run_folder(str(raw["run"]))
        iterations = tuple(raw["iterations"])
        _require(all(type(one) is int and one >= 0 for one in iterations), "iterations are no numbers")
        _require(list(iterations) == sorted(set(iterations)), "iterations are not in order")
        _require(type(raw["policies"]) is bool, "policies is neither true nor false")
        files = {str(name): _ref(run, str(name), one) for name, one in raw["files"].items()}
        _require("run.json" in files, "names no run.json")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TableIntegrityError(f"{where}: is no export ({error}). Export the run again.") from None
    return ExportRecord(run, iterations, raw["policies"], files)


def read_partial(files: StoreFiles, run: str) -> ExportRecord | None:
    """What there is of a run that was imported, or exported to this folder, in part; None for every other run."""
    path = layout.export_file(run)
    if not files.holds(path):
        return None
    record = parse_record(files.read(path), files.uri(path))
    return None if record.whole else record


def require_policies(files: StoreFiles, run: str) -> None:
    """Raises: ConfigError if the run is an export without its policies."""
    partial = read_partial(files, run)
    if partial is not None and not partial.policies:
        raise ConfigError(
            f"run {run!r} in {files.url} is an export without policies, so no update can be computed again. "
            "Give --through advantages, or export it with its policies."
        )


def named_iterations(iterations: Iterable[int]) -> str:
    """`0 to 3, 12`: for people."""
    spans: list[list[int]] = []
    for one in iterations:
        if spans and spans[-1][1] == one - 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans) or "none"


def _ref(run: str, name: str, raw: Mapping[str, object]) -> FileRef:
    sha256, size = raw["sha256"], raw["bytes"]
    _require(_is_name(name), f"{name!r} is no name of a run's file")
    _require(isinstance(sha256, str) and bool(_HASH.fullmatch(sha256)), f"{name}: the hash is none")
    _require(type(size) is int and size >= 0, f"{name}: the size is none")
    return FileRef(f"{run}/{name}", str(sha256), int(str(size)))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_name(name: str) -> bool:
    """Whether a file of this name lies in the run's folder, where a run has its files, and is no unfinished one."""
    first, *rest = parts = name.split("/")
    plain = name.isprintable() and "\\" not in name
    safe = all(part not in ("", ".", "..") and not part.startswith(TEMPORARY) for part in parts)
    return plain and safe and (name == "run.json" or (first in _FOLDERS and bool(rest)))
