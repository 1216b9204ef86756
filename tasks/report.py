"""Stage: what people see of a committed iteration. A report that fails is a warning: the iteration stands."""

import asyncio
import base64
import math
import time
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.resources import RunResources
from infra.store.manifests import CommittedManifest
from infra.tracking.curves import curves_png
from infra.tracking.tracker import IterationRecord
from tasks.logs import stage_logger

PICTURE_EVERY_S = 60.0
"""Drawing takes a second or two: not after each iteration of a few seconds."""

_LINE = (
    ("success", "success", "{:.3f}"),
    ("{main}/reward", "{main} reward", "{:.3f}"),
    ("{sub}/reward", "{sub} reward", "{:.3f}"),
    ("{sub}/invocations_mean", "{sub} calls", "{:.1f}"),
    ("update/{policy}/grad_norm", "grad {policy}", "{:.2f}"),
)


@task(cache_policy=NO_CACHE)
async def report_iteration(
    resources: RunResources, committed: CommittedManifest, metrics: Mapping[str, float], seconds: float
) -> None:
    """One line of the numbers that matter, MLflow, and Prefect artifacts: summary, table, and the curves."""
    manifest = committed.manifest
    line = summary_line(resources, manifest.iteration, metrics, seconds)
    resources.progress.console.print(line, highlight=False)
    stage_logger().info(line)
    resources.tracker.log_iteration(
        IterationRecord(
            iteration=manifest.iteration,
            metrics=metrics,
            policy_versions={name: step.to_version for name, step in manifest.policies.items()},
            manifest_json=manifest.to_bytes().decode(),
        )
    )
    try:
        await _artifacts(resources, committed, metrics, seconds)
        await _picture(resources, manifest.iteration)
    except Exception as error:
        stage_logger().warning("Artifacts of iteration %s are missing: %s", manifest.iteration, error)


def summary_line(resources: RunResources, iteration: int, metrics: Mapping[str, float], seconds: float) -> str:
    """`quickstart-0007  6.1 s  success 0.312  main reward 0.288 …`."""
    config = resources.config
    parts = [f"{resources.run.name}-{iteration:04d}", f"{seconds:.1f} s"]
    for name, label, form in _LINE:
        owners = {"main": [config.main_agent], "sub": config.sub_agents, "policy": config.trained_policies}
        kind = next((kind for kind in owners if f"{{{kind}}}" in name), None)
        for owner in owners[kind] if kind else [""]:
            value = metrics.get(name.format(**{kind: owner}) if kind else name)
            if value is not None:
                parts.append(f"{label.format(**{kind: owner}) if kind else label} {form.format(value)}")
    return "  ".join(parts)


def finite_or_none(value: float) -> float | None:
    """A number that JSON has; NaN and infinity are None, for they would reach the API as invalid JSON."""
    return value if math.isfinite(value) else None


async def _artifacts(
    resources: RunResources, committed: CommittedManifest, metrics: Mapping[str, float], seconds: float
) -> None:
    manifest = committed.manifest
    rows: list[dict[str, Any]] = [
        {"metric": name, "value": finite_or_none(round(value, 6))} for name, value in sorted(metrics.items())
    ]
    await acreate_table_artifact(
        rows, key="mgrpo-iteration-table", description=f"{manifest.run}-{manifest.iteration:04d}"
    )
    versions = "\n".join(
        f"| {name} | {step.from_version} | {step.to_version} | `{step.sha256[:12]}` |"
        for name, step in manifest.policies.items()
    )
    text = (
        f"# {manifest.run}, iteration {manifest.iteration}\n\n"
        f"{summary_line(resources, manifest.iteration, metrics, seconds)}\n\n"
        f"| policy | from | to | sha256 |\n|---|---|---|---|\n{versions}\n\n"
        f"Store: `{resources.run.uri}` · manifest `{committed.sha256[:12]}` · config `{manifest.config_sha256[:12]}` · "
        f"code `{manifest.code_version}`\n"
    )
    await acreate_markdown_artifact(text, key="mgrpo-iteration-summary")


async def _picture(resources: RunResources, iteration: int) -> None:
    last = iteration + 1 == resources.config.iterations
    now = time.monotonic()
    if not last and now - resources.picture_drawn_at < PICTURE_EVERY_S:
        return
    resources.picture_drawn_at = now
    png = await asyncio.to_thread(draw_curves, resources, iteration + 1)
    await acreate_image_artifact(
        f"data:image/png;base64,{base64.b64encode(png).decode()}",
        key="mgrpo-curves",
        description=f"{resources.run.name}, {iteration + 1} iterations",
    )


def draw_curves(resources: RunResources, iterations: int) -> bytes:
    """Draw the run's curves, keep them as a file and in MLflow, and return the PNG."""
    png = curves_png(resources.history.rows(iterations), f"{resources.run.name}: {iterations} iterations")
    resources.curves_file.parent.mkdir(parents=True, exist_ok=True)
    resources.curves_file.write_bytes(png)
    resources.tracker.log_picture("curves.png", png)
    return png
