"""Stage: what people see of a committed iteration. A report that fails is a warning: the iteration stands."""

import asyncio
import base64
import time
from collections.abc import Mapping

from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact

from infra.resources import RunResources
from infra.store.manifests import CommittedManifest
from infra.tracking.curves import curves_png
from infra.tracking.mismatch import growing_mismatch, mismatch_advice
from infra.tracking.summary import IterationSummary, PolicyChange, console_line, markdown_summary, table_rows
from infra.tracking.tracker import IterationRecord
from mgrpo_core.errors import StoreError
from mgrpo_core.update.mismatch_growth import MismatchGrowth
from tasks.logs import stage_logger
from tasks.stage import stage

PICTURE_EVERY_S = 60.0
"""Drawing takes a second or two: not after each iteration of a few seconds."""


@stage
async def report_iteration(
    resources: RunResources, committed: CommittedManifest, metrics: Mapping[str, float], seconds: float
) -> None:
    """One line of the numbers that matter, MLflow, and Prefect artifacts: summary, table, and the curves."""
    manifest = committed.manifest
    config = resources.config
    drifting = await asyncio.to_thread(_drifting, resources, manifest.iteration)
    advice = tuple(mismatch_advice(policy, growth, config, metrics) for policy, growth in drifting.items())
    summary = IterationSummary(
        run=manifest.run,
        iteration=manifest.iteration,
        seconds=seconds,
        main_agent=config.main_agent,
        sub_agents=config.sub_agents,
        metrics=metrics,
        changes={
            policy: PolicyChange(step.from_version, step.to_version, step.sha256)
            for policy, step in manifest.policies.items()
            if policy in config.trained_policies
        },
        provenance={
            "store": resources.run.uri,
            "manifest": committed.sha256[:12],
            "config": manifest.config_sha256[:12],
            "code": manifest.code_version,
            **_tracked_at(resources),
        },
        drifting=drifting,
        advice=advice,
    )
    line = console_line(summary)
    resources.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
    stage_logger().info(line)
    for sentence in advice:
        stage_logger().warning(sentence)
    tell_tracker(resources, committed, metrics)
    try:
        await acreate_markdown_artifact(markdown_summary(summary), key="mgrpo-iteration-summary")
        await acreate_table_artifact(table_rows(metrics), key="mgrpo-iteration-table", description=summary.name)
        await _picture(resources, manifest.iteration)
    except Exception as error:
        stage_logger().warning("Artifacts of iteration %s are missing: %s", manifest.iteration, error)


def _drifting(resources: RunResources, iteration: int) -> dict[str, MismatchGrowth]:
    try:
        return growing_mismatch(resources.history, iteration, resources.config.trained_policies)
    except StoreError as error:
        stage_logger().warning("Whether sampler and trainer drift apart cannot be told: %s", error)
        return {}


def _tracked_at(resources: RunResources) -> dict[str, str]:
    """The run's page in MLflow, where a server shows one."""
    link = resources.tracker.link
    return {"mlflow": link} if link else {}


async def report_evaluation(markdown: str) -> None:
    """Keep what an evaluation found as an artifact of its flow run."""
    try:
        await acreate_markdown_artifact(markdown, key="mgrpo-held-out")
    except Exception as error:
        stage_logger().warning("The artifact of the evaluation is missing: %s", error)


def tell_tracker(resources: RunResources, committed: CommittedManifest, metrics: Mapping[str, float]) -> None:
    """Have the tracker store a committed iteration; told twice, it is stored once."""
    manifest = committed.manifest
    resources.tracker.log_iteration(
        IterationRecord(
            iteration=manifest.iteration,
            metrics=metrics,
            policy_versions={name: step.to_version for name, step in manifest.policies.items()},
            manifest_json=manifest.to_bytes().decode(),
        )
    )


def draw_curves(resources: RunResources, iterations: int) -> bytes:
    """Draw the run's curves, keep them as a file and in MLflow, and return the PNG."""
    png = curves_png(resources.history.rows(iterations), f"{resources.run.name}: {_counted(iterations)}")
    resources.curves_file.parent.mkdir(parents=True, exist_ok=True)
    resources.curves_file.write_bytes(png)
    resources.tracker.log_picture("curves.png", png)
    return png


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
        description=f"{resources.run.name}, {_counted(iteration + 1)}",
    )


def _counted(iterations: int) -> str:
    return "1 iteration" if iterations == 1 else f"{iterations} iterations"
