"""Export and import on the command line: what is said of wrong input, and Ctrl-C in the middle."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from infra.store.files import StoreFiles
from infra.store.runs import StoredRun, run_names
from infra.store.verify import verify_run
from tests.infra.store import small_run

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> Result:
    """A command of mgrpo, in this process: it starts no flow."""
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transfer")
    small_run.write_run(StoreFiles(str(folder / "store")), "r", folder, 2)
    return folder / "store"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "r"), "give a TARGET, or --jsonl FILE"),
        (("export", "nobody", "x.tar"), "Runs there: r"),
        (("export", "r", "x.tar", "--iteration", 7), "iteration 7 of run 'r' is not committed. Committed: 0 to 1"),
        (("export", "r", "x.tar", "--tokens"), "--tokens: is for plain text"),
        (("export", "r", "s3://key:s3cret@bucket/x.tar"), "holds credentials"),
        (("import", "nothing.tar.zst"), "there is no such file"),
        (("import", "."), "found none"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(store, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    ended = run(*arguments, "--store", store)
    assert ended.exit_code == 2
    assert words in ended.stderr
    assert "s3cret" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_programs_are_told_in_json(store, tmp_path):
    exported = run(
        *("export", "r", tmp_path / "x.tar", "--iteration", 1, "--jsonl", tmp_path / "x.jsonl"),
        *("--store", store, "--json"),
    )
    said = json.loads(exported.stdout)
    assert (said["iterations"], said["policies"], said["lines"]) == ([1], True, 10)
    imported = json.loads(run("import", tmp_path / "x.tar", "--store", tmp_path / "there", "--json").stdout)
    assert (imported["iterations"], imported["whole"]) == ([1], False)
    listed = json.loads(run("runs", "--store", tmp_path / "there", "--json").stdout)
    assert [(one["run"], one["iterations"], one["problem"]) for one in listed] == [("r", 1, None)]


def test_damage_ends_with_1(store, tmp_path):
    run("export", "r", tmp_path / "x.tar", "--store", store)
    data = bytearray((tmp_path / "x.tar").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.tar").write_bytes(bytes(data))
    ended = run("import", tmp_path / "x.tar", "--store", tmp_path / "there")
    assert ended.exit_code == 1
    assert run_names(StoreFiles(str(tmp_path / "there"))) == []


def test_ctrl_c_in_the_middle_of_an_import_shows_nothing_and_the_same_command_completes_it(store, tmp_path):
    run("export", "r", tmp_path / "x.tar", "--store", store)
    there = tmp_path / "there"
    slow = (
        "import time, infra.portable.importing as importing\n"
        "plain = importing.copy_checked\n"
        "def copy_slowly(*arguments):\n"
        "    time.sleep(0.2)\n"
        "    plain(*arguments)\n"
        "importing.copy_checked = copy_slowly\n"
        f"from flows.cli import app\napp(['import', {str(tmp_path / 'x.tar')!r}, '--store', {str(there)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(there.glob(".tmp-import-*/r/**/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "No run has appeared" in said
    assert run_names(StoreFiles(str(there))) == []

    ended = run("import", tmp_path / "x.tar", "--store", there)
    assert ended.exit_code == 0, ended.stderr
    assert verify_run(StoredRun(StoreFiles(str(there)), "r")).sound
    assert [path.name for path in there.iterdir()] == ["r"]
