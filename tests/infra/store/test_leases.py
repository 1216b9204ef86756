import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from infra.store import leases
from infra.store.files import StoreFiles
from infra.store.layout import leases_folder
from infra.store.leases import Owner, creating_run, take_lease
from mgrpo_core.errors import IterationTakenError


@pytest.fixture(params=["local", "s3"])
def dated_files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    """Stores that say when a file was written; memory does not, and no other process could write there."""
    return StoreFiles(str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_url"))


def owner(who: str = "r-0003") -> Owner:
    return Owner.this_process(who)


def elsewhere(who: str = "far") -> Owner:
    return replace(owner(who), machine="another", host="far-away")


def test_a_second_live_process_is_refused_and_told_who_computes(files: StoreFiles) -> None:
    with_it = take_lease(files, "r", 3, owner("r-0003"))
    with pytest.raises(IterationTakenError, match=rf"iteration 3 of run 'r'.*r-0003 \(process {os.getpid()}"):
        take_lease(files, "r", 3, owner("other"))
    with_it.release()
    take_lease(files, "r", 3, owner("other")).release()


def test_a_dead_process_of_this_machine_is_replaced_at_once(files: StoreFiles) -> None:
    code = (
        "import sys; from infra.store.files import StoreFiles; from infra.store.leases import *;"
        "import os, json; from dataclasses import asdict; print(json.dumps(asdict(Owner.this_process('dead'))))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    files.write(f"{leases_folder('r', 0)}/0000.lease.json", said.encode())
    lease = take_lease(files, "r", 0, owner(), dead_after_s=1000)
    assert lease.taken_from is not None
    assert lease.taken_from.who == "dead"
    lease.release()


def test_a_pid_that_another_process_has_now_does_not_count_as_alive(files: StoreFiles) -> None:
    before = replace(owner("dead"), started=1.0)
    files.write(f"{leases_folder('r', 0)}/0000.lease.json", leases._json(before))
    take_lease(files, "r", 0, owner(), dead_after_s=1000).release()


def test_an_owner_elsewhere_is_left_alone_while_it_renews(dated_files: StoreFiles) -> None:
    path = f"{leases_folder('r', 0)}/0000.lease.json"
    dated_files.write(path, leases._json(elsewhere()))
    waits: list[str] = []
    renewal = threading.Timer(0.3, dated_files.write, (path, leases._json(elsewhere())))
    renewal.start()
    with pytest.raises(IterationTakenError, match="far-away"):
        take_lease(dated_files, "r", 0, owner(), on_wait=waits.append, dead_after_s=3)
    renewal.join()
    assert len(waits) == 1


def test_an_owner_elsewhere_that_does_not_renew_is_replaced_and_learns_it(dated_files: StoreFiles) -> None:
    first = take_lease(dated_files, "r", 0, elsewhere())
    second = take_lease(dated_files, "r", 0, owner("second"), dead_after_s=0.4)
    with pytest.raises(IterationTakenError, match="second"):
        first.require()
    second.require()
    first.stop()
    second.release()


def test_renewal_shows_in_the_store(dated_files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    lease = take_lease(dated_files, "r", 0, elsewhere())
    try:
        with pytest.raises(IterationTakenError):
            take_lease(dated_files, "r", 0, owner(), dead_after_s=2)
    finally:
        lease.release()


def test_a_lease_that_cannot_be_read_blocks_nobody(dated_files: StoreFiles) -> None:
    dated_files.write(f"{leases_folder('r', 0)}/0000.lease.json", b"{half")
    take_lease(dated_files, "r", 0, owner()).release()


def test_of_eight_at_once_one_gets_it(raced_files: StoreFiles) -> None:
    taken, refused = [], []

    def contend(number: int) -> None:
        try:
            taken.append(take_lease(raced_files, "r", 0, owner(f"contender-{number}")))
        except IterationTakenError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert len(refused) == 7
    assert all(taken[0].owner.who in one for one in refused)
    taken[0].release()


def test_of_four_that_create_a_run_at_once_each_has_its_turn_alone(raced_files: StoreFiles) -> None:
    inside, most = [0], [0]
    guard = threading.Lock()

    def create(number: int) -> None:
        with creating_run(raced_files, "r", owner(f"start-{number}")):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.05)
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == ([0], [1])
