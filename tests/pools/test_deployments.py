"""prefect.yaml is what `mgrpo deploy` would write, and Prefect's own command takes it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.deployments.specs import Placement, as_prefect_yaml, deployment_specs
from flows.load_config import load_config
from tests.pools.cluster import ROOT, Cluster

pytestmark = pytest.mark.timeout(900)  # the first test of a session starts the services
FILE = ROOT / "prefect.yaml"


def test_prefect_yaml_is_that_of_the_quickstart() -> None:
    config = load_config("quickstart", ["execution.mode=work_pools"])
    expected = as_prefect_yaml(deployment_specs(config, Placement("quickstart", "s3://mgrpo/runs")))
    command = "mgrpo deploy quickstart --store s3://mgrpo/runs --prefect-yaml"
    assert yaml.safe_load(FILE.read_text(encoding="utf-8")) == expected, f"write it anew: {command} > prefect.yaml"


def test_what_prefect_deploys_from_the_file_is_what_mgrpo_deploys(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    again = cluster.mgrpo("deploy", "quickstart", "--store", "s3://mgrpo/runs")
    assert again.returncode == 0, again.stderr
    lines = [line for line in again.stdout.splitlines() if line.startswith("deployment")]
    assert len(lines) == 6
    assert all(line.endswith("unchanged") for line in lines), again.stdout


def test_deploying_without_a_server_says_how_to_name_one(cluster: Cluster, tmp_path: Path) -> None:
    environment = {name: value for name, value in cluster.environment.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-m", "flows.cli", "deploy", "quickstart"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PREFECT_API_URL" in done.stderr
    assert "source mgrpo-out/up/env" in done.stderr


def test_a_store_that_only_one_machine_sees_is_refused(cluster: Cluster) -> None:
    done = cluster.mgrpo("deploy", "quickstart", "--store", "here")
    assert done.returncode == 2
    assert "another place for every worker" in done.stderr
    assert not (cluster.folder / "here").exists()
