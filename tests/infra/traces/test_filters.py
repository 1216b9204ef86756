"""Filters of trajectories: each alone, together, and text wherever it was said."""

import numpy as np
import pyarrow as pa
import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.schemas import TRAJECTORIES
from infra.store.stored_iteration import StoredIteration, open_stored
from infra.store.tables import table_writer
from infra.store.trajectory_rows import trajectories_table
from infra.traces.filters import TraceFilter, select
from infra.traces.index import trajectory_index
from mgrpo_core.errors import ConfigError
from mgrpo_core.trajectories import Message, PathStep, Status, StopReason, Trajectory, TrajectoryKey
from tests.infra.store.small_run import manifest, write_run, write_tables

SAID = (
    {"task": "Where does the Ärmel end?"},
    {"reply": "<b>At the hand.</b>"},
    {"messages": (Message("user", "nothing"), Message("tool", "At the\n\x00 wrist"))},
    {},
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredIteration:
    folder = tmp_path_factory.mktemp("stored")
    return open_stored(write_run(StoreFiles(str(folder / "store")), "r", folder / "scratch", 1), 0)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> StoredIteration:
    """Four trajectories of the main agent, each in a row group of its own."""
    folder = tmp_path_factory.mktemp("talk")
    files = StoreFiles(str(folder / "store"))
    config = open_stored(write_run(files, "other", folder / "scratch", 1), 0).config
    tables = write_tables(files, "r", 0)
    path = layout.trajectories_file("r", 0, "main", 0)
    with table_writer(files, path, TRAJECTORIES) as writer:
        for position, said in enumerate(SAID):
            writer.write(trajectories_table([(position, _trajectory(f"q{position}", **said))]))
            writer.flush()
    tables["trajectories/main-0000.parquet"] = writer.ref
    return StoredIteration(files, manifest("r", 0, tables, {}), config)


def _trajectory(query_id: str, *, task="-", reply=None, messages=()) -> Trajectory:
    nothing = np.zeros(0)
    key = TrajectoryKey("r", 0, query_id, 0, (PathStep("main", 0),))
    return Trajectory(
        key, "main", nothing, nothing, nothing, (0,), (), messages, task, reply, 1.0, Status.OK, StopReason.ANSWER
    )


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (TraceFilter(), 10),
        (TraceFilter(agent="searcher"), 6),
        (TraceFilter(agent="nobody"), 0),
        (TraceFilter(status="infra_failed"), 0),
        (TraceFilter(query_id="q1", rollout_index=1), 3),
        (TraceFilter(policy="main"), 4),
        (TraceFilter(sign="+"), 3),  # rewards 0, 0.5, 1, 0, 0.5, 1, 0, 0.5, 1, 0: above 0 at 1
        (TraceFilter(sign="0"), 3),
        (TraceFilter(sign="-"), 4),
        (TraceFilter(min_reward=0.5), 6),
        (TraceFilter(min_reward=0.1, max_reward=0.5), 3),
        (TraceFilter(agent="main", sign="-", max_reward=0), 1),
        (TraceFilter(text="WHAT is it"), 10),
        (TraceFilter(agent="main", text="nowhere"), 0),
    ],
)
def test_what_is_wanted_is_kept(stored, wanted, count):
    index = trajectory_index(stored)
    kept = select(stored, index, wanted)
    assert kept.num_rows == count
    assert kept.schema == index.schema


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ärmel END", [0]),
        ("the hand", [1]),
        ("<B>at", [1]),
        ("\x00 wri", [2]),
        ("at the", [1, 2]),
        (".*", []),
        ("-", [1, 2, 3]),
    ],
)
def test_text_is_found_in_task_reply_and_messages(talk, text, found):
    index = trajectory_index(talk)
    main = index.filter(pa.compute.equal(index.column("agent"), "main"))  # type: ignore[attr-defined]
    assert select(talk, main, TraceFilter(text=text)).column("query_position").to_pylist() == found


def test_a_sign_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"expected \+, - or 0"):
        TraceFilter(sign="plus")  # type: ignore[arg-type]
