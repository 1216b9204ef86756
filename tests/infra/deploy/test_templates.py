"""Base job templates for Kubernetes pools: Prefect renders them, the schemas of Kubernetes judge what comes out."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate.utils import all_versions, latest_version
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import find_placeholders
from prefect.workers.base import BaseJobConfiguration

from infra.deploy import settings

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra" / "deploy" / "kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.json"))
VERSIONS = [all_versions()[0], latest_version()]

# Prefect's Kubernetes worker demands these two in the pod's spec, where Kubernetes knows no such fields and drops them.
MISPLACED_BY_PREFECT = {"completions": 1, "parallelism": 1}


class JobConfiguration(BaseJobConfiguration):
    """The part of the Kubernetes worker's configuration that takes the template's manifest."""

    job_manifest: dict[str, Any]


def template(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


async def rendered(name: str, /, **job_variables: Any) -> JobConfiguration:
    """What a worker makes of the template as the server gives it back, and a deployment's job variables."""
    async with get_client() as client:
        pool = await client.create_work_pool(
            WorkPoolCreate(name=name.removesuffix(".json"), type="kubernetes", base_job_template=template(name)),
            overwrite=True,
        )
        return await JobConfiguration.from_template_and_values(pool.base_job_template, job_variables, client=client)


def as_submitted(configuration: JobConfiguration) -> dict[str, Any]:
    """The manifest after the worker's own additions: environment as a list, a command."""
    manifest = copy.deepcopy(configuration.job_manifest)
    pod = manifest["spec"]["template"]["spec"]
    for name, value in MISPLACED_BY_PREFECT.items():
        assert pod.pop(name) == value
    container = pod["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in configuration.env.items()]
    container.setdefault("args", ["prefect", "flow-run", "execute"])
    return manifest


pytestmark = pytest.mark.usefixtures("prefect_server")
each_template = pytest.mark.parametrize("name", TEMPLATES)


def test_there_is_one_for_each_kind_of_pool() -> None:
    assert TEMPLATES == ["cpu-pool.json", "gpu-pool.json"]


@each_template
def test_every_variable_that_is_used_is_defined_and_the_other_way_round(name: str) -> None:
    found = template(name)
    used = {placeholder.name for placeholder in find_placeholders(found["job_configuration"])}
    assert used == set(found["variables"]["properties"])


@each_template
def test_every_variable_is_explained_and_its_default_is_of_its_type(name: str) -> None:
    import jsonschema

    for variable, schema in template(name)["variables"]["properties"].items():
        assert schema["title"], variable
        assert schema["description"].endswith("."), variable
        if "default" in schema:
            jsonschema.validate(schema["default"], schema)


@each_template
@pytest.mark.parametrize("version", VERSIONS)
async def test_kubernetes_takes_the_job_that_the_defaults_make(name: str, version: str) -> None:
    kubernetes_validate.validate(as_submitted(await rendered(name)), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
async def test_kubernetes_takes_the_job_that_every_variable_makes(version: str) -> None:
    job = await rendered(
        "gpu-pool.json",
        name="run",
        labels={"team": "a"},
        annotations={"why": "b"},
        service_account_name="updater",
        cpu_request="8",
        cpu_limit="16",
        memory_request="64Gi",
        memory_limit="128Gi",
        gpu_count=4,
        shared_memory_size="32Gi",
        node_selector={"nvidia.com/gpu.product": "NVIDIA-H200"},
        tolerations=[{"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"}],
        grace_period_seconds=300,
        finished_job_ttl=60,
    )
    manifest = as_submitted(job)
    kubernetes_validate.validate(manifest, version, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "limits": {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": 4},
        "requests": {"cpu": "8", "memory": "64Gi"},
    }
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["tolerations"] == [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"}]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert pod["serviceAccountName"] == "updater"
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 60
    assert manifest["metadata"]["labels"] == {"team": "a"}


async def test_the_schemas_find_a_misspelt_field() -> None:
    manifest = as_submitted(await rendered("gpu-pool.json"))
    pod = manifest["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


async def test_an_update_gets_one_gpu_unless_told_otherwise_and_an_iteration_none() -> None:
    limits = {}
    for name in TEMPLATES:
        pod = (await rendered(name)).job_manifest["spec"]["template"]["spec"]
        limits[name] = pod["containers"][0]["resources"]["limits"]
    assert limits == {"cpu-pool.json": {}, "gpu-pool.json": {"nvidia.com/gpu": 1}}


@each_template
async def test_nothing_of_a_template_is_left_unfilled(name: str) -> None:
    assert find_placeholders((await rendered(name)).job_manifest["spec"]) == set()


@each_template
async def test_kubernetes_starts_no_job_again_by_itself(name: str) -> None:
    manifest = (await rendered(name)).job_manifest
    assert manifest["spec"]["backoffLimit"] == 0
    assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@each_template
async def test_processes_of_a_run_share_memory(name: str) -> None:
    pod = (await rendered(name)).job_manifest["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"]["medium"] == "Memory"


@each_template
async def test_credentials_come_from_a_secret_and_from_nowhere_else(name: str) -> None:
    job = await rendered(name, credentials_secret="of-this-team")
    container = job.job_manifest["spec"]["template"]["spec"]["containers"][0]
    assert [source["secretRef"]["name"] for source in container["envFrom"]] == ["of-this-team"]
    text = (FOLDER / name).read_text(encoding="utf-8")
    secret = re.compile("KEY|SECRET|PASSWORD|TOKEN(?!IZERS)|AUTH")
    assert [variable for variable in job.env if secret.search(variable)] == []
    assert not re.search(r'"(?:value|stringData|data)":', text)


@each_template
async def test_runs_have_the_settings_of_other_runs_and_a_deployment_adds_to_them(name: str) -> None:
    job = await rendered(name, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert job.env == {**settings.PREFECT_RUN, **settings.S3_CLIENT, "CUDA_VISIBLE_DEVICES": "0"}


@each_template
async def test_the_pod_runs_as_the_user_of_the_image(name: str) -> None:
    pod = (await rendered(name)).job_manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image, version = container["image"].split(":")
    dockerfile = ROOT / "infra" / "deploy" / "images" / f"{image.removeprefix('mgrpo-')}.Dockerfile"
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@each_template
async def test_the_workers_own_rules_hold(name: str) -> None:
    """What prefect-kubernetes 0.8 refuses a manifest without (`_get_base_job_manifest`)."""
    manifest = (await rendered(name)).job_manifest
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    pod = manifest["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["name"] == "prefect-job"
    assert MISPLACED_BY_PREFECT.items() <= pod.items()
