"""`mgrpo up` and `mgrpo down` with real services: that they answer, come back when killed, and leave nothing behind."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.deploy.local import http_calls
from infra.deploy.local.home import LocalHome
from infra.deploy.local.leftovers import find_leftovers, is_alive, mark_of
from infra.deploy.local.services import Services, find_services, local_services, start_services, stop_services
from infra.deploy.local.settings import LocalSettings, Ports
from mgrpo_core.errors import ConfigError, InfrastructureError

MGRPO = str(Path(sys.executable).parent / "mgrpo")
ANY_PORTS = ("--server-port=0", "--s3-port=0", "--mlflow-port=0", "--postgres-port=0")
UP_S3 = ("up", "--only", "s3", "--s3-port", "0")
S3_ONLY = LocalSettings(services=("s3",), ports=Ports(s3=0))
DEADLINE_S = 240.0  # two cores, shared


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that everybody may pass through: with root's tmp_path the database would go to /var/lib."""
    made = Path(tempfile.mkdtemp(prefix="mgrpo-up-test-"))
    made.chmod(0o755)
    yield made
    for home in made.iterdir():
        stop_services(LocalHome(home))
    shutil.rmtree(made)


@pytest.fixture
def home(folder: Path, request: pytest.FixtureRequest) -> LocalHome:
    return LocalHome(folder / re.sub(r"\W+", "-", request.node.name)[-20:])


def mgrpo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MGRPO, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def s3_client(environment: dict[str, str], **config: object):
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
        config=Config(retries={"total_max_attempts": 2}, **config),
    )


def put(environment: dict[str, str], key: str, body: bytes) -> None:
    client = s3_client(environment)
    client.put_object(Bucket="mgrpo", Key=key, Body=body)
    client.close()


def got(environment: dict[str, str], key: str) -> bytes:
    client = s3_client(environment)
    body = client.get_object(Bucket="mgrpo", Key=key)["Body"].read()
    client.close()
    return body


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ports_of(services: Services) -> list[int]:
    ports = services.settings.ports
    return [ports.server, ports.s3, ports.mlflow, ports.postgres, *ports.s3_inner]


@pytest.fixture(scope="module")
def foreground(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`mgrpo up` with everything, up, in the foreground of a process of its own."""
    home = folder / "all"
    process = subprocess.Popen(
        [MGRPO, "up", "--home", str(home), *ANY_PORTS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ctrl-C" in line:
            break
    assert process.poll() is None, "".join(said)
    yield process
    if process.poll() is None:
        process.terminate()
        process.wait(DEADLINE_S)
    process.stdout.close()


@pytest.fixture
def services(foreground: subprocess.Popen[str], folder: Path) -> Services:
    found = find_services(LocalHome(folder / "all"))
    assert found is not None
    return found


def test_the_env_file_is_private_and_says_where_everything_is(services):
    mode = stat.S_IMODE(services.home.env_file.stat().st_mode)
    assert mode == 0o600
    shown = subprocess.run(
        ["bash", "-c", f"set -eu; . '{services.home.env_file}'; env -0"],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    exported = dict(entry.split("=", 1) for entry in shown.stdout.split("\0") if "=" in entry)
    ports = services.settings.ports
    assert services.environment.items() <= exported.items()
    assert exported["PREFECT_API_URL"] == f"http://127.0.0.1:{ports.server}/api"
    assert exported["AWS_ENDPOINT_URL"] == f"http://127.0.0.1:{ports.s3}"
    assert exported["MLFLOW_TRACKING_URI"] == f"http://127.0.0.1:{ports.mlflow}"
    assert exported["MGRPO_STORE"] == "s3://mgrpo/runs"
    assert exported["AWS_DEFAULT_REGION"] == "us-east-1"
    assert exported["AWS_EC2_METADATA_DISABLED"] == "true"


def test_prefect_answers_from_postgresql_and_mlflow_answers(services):
    api = services.environment["PREFECT_API_URL"]
    with urllib.request.urlopen(f"{api}/health", timeout=10) as response:
        assert json.load(response) is True
    with urllib.request.urlopen(f"{services.environment['MLFLOW_TRACKING_URI']}/health", timeout=10) as response:
        assert response.read() == b"OK"
    assert not list((services.home.data / "prefect").glob("*.db")), "nothing is kept in SQLite"
    assert services.pid("postgres") is not None


def test_s3_gives_what_was_put_to_its_own_keys_only(services):
    put(services.environment, "one", b"1")
    assert got(services.environment, "one") == b"1"
    guessed = s3_client({**services.environment, "AWS_SECRET_ACCESS_KEY": "guessed"})
    for client in (guessed, s3_client(services.environment, signature_version=UNSIGNED)):
        with pytest.raises(ClientError, match=r"AccessDenied|SignatureDoesNotMatch"):
            client.get_object(Bucket="mgrpo", Key="one")
        client.close()


def test_every_pool_has_a_worker_online_and_a_killed_one_comes_back(services):
    api = services.environment["PREFECT_API_URL"]
    assert services.settings.pools == ("mgrpo-cpu", "mgrpo-gpu-main", "mgrpo-gpu-sub")
    for pool in services.settings.pools:
        (worker,) = http_calls.post_json(f"{api}/work_pools/{pool}/workers/filter", {})
        assert worker["status"] == "ONLINE"
    name = "worker-mgrpo-gpu-main"
    before = services.pid(name)
    services.kill(name, signal.SIGKILL)
    services.wait_for(name, other_than=before)
    assert services.pid(name) != before


def test_up_again_says_where_it_is_and_starts_nothing(services):
    pids = [services.pid(program.name) for program in services.programs]
    again = mgrpo("up", "--home", services.home.folder, "--detach", *ANY_PORTS)
    assert again.returncode == 0, again.stderr
    assert "Already up" in again.stdout
    assert services.environment["AWS_ENDPOINT_URL"] in again.stdout
    assert [services.pid(program.name) for program in services.programs] == pids


def test_up_again_for_a_pool_without_worker_is_refused(services):
    other = mgrpo("up", "--home", services.home.folder, "--set", "execution.iteration_pool=other", *ANY_PORTS)
    assert other.returncode == 2
    assert "not for other" in other.stderr
    assert "mgrpo down" in other.stderr


def test_no_log_has_a_secret(services):
    keys = services.home.keys()
    logs = list(services.home.logs.iterdir())
    assert {"server.log", "postgres.log", "s3.log", "mlflow.log", "supervisord.log"} <= {log.name for log in logs}
    for log in logs:
        text = log.read_text(errors="replace")
        for secret in (keys.postgres_password, keys.s3_secret_key):
            assert secret not in text, log
    for process in find_leftovers(services.home):
        assert keys.postgres_password not in " ".join(process.cmdline())


def test_sigterm_stops_everything_with_143(foreground, services):
    ports = ports_of(services)
    assert all(listens(port) for port in ports)
    marked = find_leftovers(services.home)
    assert len(marked) > len(services.programs)
    foreground.terminate()
    assert foreground.wait(DEADLINE_S) == 143
    assert not [process for process in marked if is_alive(process.pid)]
    assert not find_leftovers(services.home)
    assert not [port for port in ports if listens(port)]
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{ports[-1]}.sock"))


def test_ctrl_c_in_the_middle_of_the_start_stops_what_was_started_with_130(home):
    with subprocess.Popen([MGRPO, *UP_S3, "--home", str(home.folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: len(find_leftovers(home)) == 2)  # supervisord and the S3 server
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    assert not find_leftovers(home)
    assert home.running() is None


def test_services_of_a_killed_command_are_found_by_up_and_stopped_by_down(home):
    with subprocess.Popen([MGRPO, *UP_S3, "--home", str(home.folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("Ctrl-C" in line for line in process.stdout)
        process.kill()
    services = find_services(home)
    assert services is not None
    assert services.are_whole()
    again = mgrpo(*UP_S3, "--home", home.folder, "--detach")
    assert (again.returncode, again.stdout.split(",")[0]) == (0, "Already up")
    for said in ("All stopped", "Nothing is up"):
        stopped = mgrpo("down", "--home", home.folder)
        assert (stopped.returncode, said in stopped.stdout) == (0, True)
        assert not find_leftovers(home)


def test_a_start_replaces_what_a_killed_supervisord_left_and_keeps_its_data(home):
    with local_services(home.folder, S3_ONLY) as services:
        put(services.environment, "one", b"kept")
        before = services.pid("s3")
        os.kill(services.supervisor.pid, signal.SIGKILL)
        with local_services(home.folder, S3_ONLY) as others:
            assert before not in {process.pid for process in find_leftovers(home)}
            assert got(others.environment, "one") == b"kept"
            assert services.environment["AWS_SECRET_ACCESS_KEY"] == others.environment["AWS_SECRET_ACCESS_KEY"]
            assert not services.stop_all(), "these are not theirs to stop"
            assert others.are_whole()
    assert not find_leftovers(home)


def test_a_port_in_use_is_refused_before_anything_starts(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = mgrpo("up", "--home", home.folder, "--mlflow-port", port, *ANY_PORTS[:2], ANY_PORTS[3])
    assert refused.returncode == 2
    assert f"port {port} (MLflow server; --mlflow-port)" in refused.stderr
    assert not find_leftovers(home)
    assert not home.logs.exists()


def test_a_service_that_cannot_start_is_named_with_its_log_and_nothing_stays(home):
    home.create()
    (home.data / "postgres" / "cluster").mkdir(parents=True)  # no database cluster in it
    with pytest.raises(InfrastructureError, match="PostgreSQL: ended before it answered") as raised:
        start_services(home, LocalSettings(services=("server",), ports=Ports(server=0, postgres=0)))
    assert str(home.log_of("postgres")) in str(raised.value)
    assert not find_leftovers(home)
    assert home.running() is None


def test_a_process_in_a_session_of_its_own_is_stopped_too(home):
    # As a flow run is, whose worker was killed.
    home.folder.mkdir()
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **mark_of(home)},
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as orphan:
        try:
            assert orphan.stdout is not None
            orphan.stdout.readline()
            assert stop_services(home)
            assert orphan.wait(10) == -signal.SIGKILL
        finally:
            orphan.kill()


def test_a_home_in_hand_is_refused_to_a_second_command(home):
    with home.alone(), pytest.raises(ConfigError, match="another `mgrpo up` or `mgrpo down`"):
        start_services(home, S3_ONLY)
