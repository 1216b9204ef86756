"""What pages read: filtered and sorted where the data are, kept once read, on any store; damage is told of."""

import threading
from pathlib import Path

import pytest

from infra.store import layout
from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, open_store
from infra.traces.filters import TraceFilter
from infra.ui import run_reader
from infra.ui.addresses import IterationPage, Wanted
from infra.ui.figures_of_iteration import calls_per_rollout
from infra.ui.run_reader import RunReader
from infra.ui.trajectories import rows_response
from mgrpo_core.errors import TableIntegrityError
from tests.infra.store.conftest import moto_endpoint, s3_url
from tests.infra.ui.spoken_run import HOSTILE, RUN, write_spoken_run

__all__ = ["moto_endpoint", "s3_url"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder = tmp_path_factory.mktemp("spoken")
    return write_spoken_run(StoreFiles(str(folder / "store")), folder / "scratch", 2)


def _request(start: int = 0, stop: int = 100, sorting: tuple[tuple[str, str], ...] = ()) -> dict[str, object]:
    return {"startRow": start, "endRow": stop, "sortModel": [{"colId": name, "sort": way} for name, way in sorting]}


def test_rows_come_a_block_at_a_time_in_the_wanted_order(run):
    reader, page = RunReader(run), IterationPage(1)
    ascending = _request(sorting=(("reward", "asc"), ("query", "desc")))
    found = rows_response(reader, page, Wanted(agent="main"), ascending)
    assert found["rowCount"] == 12
    rewards = [row["reward"] for row in found["rowData"]]
    assert rewards == ["0.1"] * 9 + ["1"] * 2 + ["–"]  # without a reward: last, in either direction
    assert [row["query"] for row in found["rowData"]][:3] == ["2"] * 3
    descending = rows_response(reader, page, Wanted(agent="main"), _request(sorting=(("reward", "desc"),)))
    assert [row["reward"] for row in descending["rowData"]] == ["1"] * 2 + ["0.1"] * 9 + ["–"]
    middle = rows_response(reader, page, Wanted(agent="main"), {**ascending, "startRow": 8, "endRow": 10})
    assert middle["rowData"] == found["rowData"][8:10]


def test_a_column_that_is_none_is_not_sorted_by_and_a_request_has_bounds(run):
    found = rows_response(
        RunReader(run), IterationPage(1), Wanted(), _request(-5, 10**9, (("why", "asc"), ("x", "asc")))
    )
    assert len(found["rowData"]) == found["rowCount"] == 21


def test_rows_hold_no_control_codes_and_say_why_one_is_out(run):
    rows = rows_response(RunReader(run), IterationPage(1), Wanted(), _request())["rowData"]
    assert all(text.isprintable() for row in rows for text in row.values())
    lost = [row for row in rows if row["status"] == "infra failed"]
    assert [row["why"] for row in lost] == ["the search server is down"]


def test_an_iteration_is_indexed_once_however_many_ask(run, monkeypatch):
    made: list[int] = []
    whole = run_reader.trajectory_index

    def counting(stored):
        made.append(1)
        return whole(stored)

    monkeypatch.setattr(run_reader, "trajectory_index", counting)
    reader = RunReader(run)
    askers = [threading.Thread(target=lambda: reader.index(reader.stored(1))) for _ in range(6)]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert len(made) == 1


def test_what_failed_once_is_tried_again(run, monkeypatch):
    reader = RunReader(run)
    stored = reader.stored(1)
    with monkeypatch.context() as patched:
        patched.setattr(run_reader, "trajectory_index", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reader.index(stored)
    assert reader.index(stored).num_rows == 21


def test_calls_are_counted_rollouts_without_one_included(run):
    reader = RunReader(run)
    # Of 3 queries: rollout 1 calls twice, rollout 2 once but for the last, 0 and 3 never.
    assert calls_per_rollout(reader.index(reader.stored(1)), "searcher") == {0: 6, 1: 3, 2: 3}


def test_new_iterations_and_lost_ones_are_seen(tmp_path):
    files = StoreFiles(str(tmp_path / "store"))
    run = write_spoken_run(files, tmp_path / "scratch", 2)
    manifest = Path(files.full(layout.manifest_file(RUN, 1)))
    data = manifest.read_bytes()
    manifest.unlink()
    reader = RunReader(run)
    assert reader.iterations() == 1
    manifest.write_bytes(data)
    assert reader.iterations() == 2
    manifest.unlink()
    assert reader.iterations() == 1


def test_figures_that_cannot_be_read_are_named_and_the_others_shown(tmp_path):
    files = StoreFiles(str(tmp_path / "store"))
    run = write_spoken_run(files, tmp_path / "scratch", 3)
    Path(files.full(layout.metrics_file(RUN, 0))).write_text('{"success": NaN, "main/reward": "x"}', encoding="utf-8")
    Path(files.full(layout.metrics_file(RUN, 1))).unlink()
    rows, faults = RunReader(run).figures()
    assert [row["iteration"] for row in rows] == [0, 2]
    assert rows[0] == {"iteration": 0}, "neither NaN nor text is a number to draw"
    assert len(faults) == 1
    assert faults[0].startswith("iteration 1: ")


def test_token_texts_are_those_of_the_policy_that_sampled(run):
    reader = RunReader(run)
    stored = reader.stored(1)
    one = reader.rollout(stored, 0, 1, tokens=True).root.children[0].trajectory
    texts = reader.token_texts.texts(stored, one.policy, one.token_ids.tolist())
    assert texts is not None
    assert "".join(texts).strip().startswith("look for 0")
    assert reader.token_texts.texts(stored, "nobody", [1]) is None


def test_a_run_on_s3_is_read_alike(s3_url, tmp_path):
    run = write_spoken_run(open_store(s3_url), tmp_path / "scratch", 1)
    reader = RunReader(run)
    assert len(reader.figures()[0]) == 1
    assert len(reader.selected(reader.stored(0), TraceFilter(text=HOSTILE))) == 15
    Path(tmp_path / "scratch" / "main-0" / "tokenizer.json").unlink()  # nothing is read from where it was made
    assert reader.rollout(reader.stored(0), 1, 2, tokens=True).root.children
    run.files.remove(layout.trajectories_file(RUN, 0, "searcher", 0))
    with pytest.raises(TableIntegrityError, match="missing"):
        RunReader(run).index(reader.stored(0))
