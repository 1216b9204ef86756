"""The parts of `mgrpo up` that start nothing."""

import socket
import stat
from pathlib import Path

import pytest

from flows.load_config import load_config
from flows.up import local_settings, pools_of
from infra.deploy.local.extra import package_folder, program_path
from infra.deploy.local.home import LocalHome
from infra.deploy.local.ports import settle_ports
from infra.deploy.local.program import Program
from infra.deploy.local.settings import LocalSettings, Ports
from mgrpo_core.errors import ConfigError


def program(**changes: object) -> Program:
    fields = {
        "name": "one", "title": "One", "place": "", "command": ("true",), "environment": {}, "directory": Path("/"),
        "answers": lambda _: True, "deadline_s": 1.0, "step": 0,
    }  # fmt: skip
    return Program(**{**fields, **changes})


def test_what_is_not_installed_names_the_extra():
    for look in (package_folder, program_path):
        with pytest.raises(ConfigError, match=r"no_such_thing is not installed: it is the lot.*'mgrpo\[local\]'"):
            look("no_such_thing", "the lot")


def test_ports_that_are_free_are_kept_and_0_becomes_one_that_is():
    wanted = LocalSettings(services=("s3", "mlflow"), ports=Ports(s3=0, mlflow=0))
    first = settle_ports(wanted).ports
    assert len({first.s3, first.mlflow, *first.s3_inner}) == 9
    assert settle_ports(LocalSettings(services=("s3",), ports=Ports(s3=first.s3))).ports.s3 == first.s3


def test_every_port_in_use_is_named_with_its_option():
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        ports = Ports(server=one.getsockname()[1], s3=other.getsockname()[1], mlflow=0, postgres=0)
        with pytest.raises(ConfigError) as raised:
            settle_ports(LocalSettings(ports=ports))
    assert f"port {ports.server} (Prefect server; --server-port)" in str(raised.value)
    assert f"port {ports.s3} (S3 server; --s3-port)" in str(raised.value)


def test_a_port_given_twice_is_refused():
    free = settle_ports(LocalSettings(services=("s3",), ports=Ports(s3=0))).ports.s3
    with pytest.raises(ConfigError, match="given twice"):
        settle_ports(LocalSettings(ports=Ports(server=free, s3=free, mlflow=0, postgres=0)))


def test_percent_signs_are_doubled_and_what_cannot_be_quoted_is_refused():
    section = program(command=("/a b%c/run",), environment={"A": "100%"}).section(Path("/log"))
    assert "command='/a b%%c/run'" in section
    assert 'environment=A="100%%"' in section
    for wrong in ('quo"te', "new\nline", "semi;colon"):
        with pytest.raises(ConfigError, match="cannot hold"):
            program(environment={"A": wrong}).section(Path("/log"))


def test_settings_survive_the_file_that_says_what_runs(tmp_path):
    home = LocalHome(tmp_path / "home")
    home.create()
    settings = LocalSettings(("s3",), "sqlite", ("a", "b"), Ports(s3=1, s3_inner=(2, 3)))
    running = home.new_running(settings)
    home.note_running(running)
    assert home.running() == running
    home.forget_running()
    assert home.running() is None
    assert not running.sockets.exists()


def test_sockets_of_a_long_path_lie_elsewhere(tmp_path):
    home = LocalHome(tmp_path / ("long" * 25))
    assert len(str(home.new_running(LocalSettings()).sockets)) < 80


def test_keys_are_made_once_a_home(tmp_path):
    one, other = LocalHome(tmp_path / "one"), LocalHome(tmp_path / "other")
    for home in (one, other):
        home.create()
    assert one.keys() == LocalHome(one.folder).keys()
    assert one.keys() != other.keys()


def test_workers_are_for_the_configs_pools_and_need_the_server():
    config = load_config("quickstart", ["execution.update_pools={main: shared, sub: shared}"])
    assert pools_of(config) == ("mgrpo-cpu", "shared")
    ports = (0, 0, 0, 0)
    assert local_settings(config, only=None, workers=True, database="sqlite", ports=ports).pools == pools_of(config)
    assert local_settings(config, only="mlflow, s3", workers=True, database="sqlite", ports=ports).services == (
        "s3",
        "mlflow",
    )
    assert not local_settings(config, only="s3", workers=True, database="sqlite", ports=ports).pools
    with pytest.raises(ConfigError, match="no such service: s4"):
        local_settings(config, only="s4", workers=True, database="sqlite", ports=ports)


def test_files_with_secrets_are_their_owners_alone(tmp_path):
    home = LocalHome(tmp_path / "home")
    home.create()
    home.keys()
    for _ in range(2):  # also when replaced
        home.write_env({"A": "b"})
    assert home.env_file.read_text() == "export A='b'\n"
    for file in (home.env_file, home.folder / "keys.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
