"""Policies whose sampler and trainer drift apart, from the metrics of a run's last iterations."""

from collections.abc import Iterable, Mapping

from infra.tracking.history import RunHistory
from mgrpo_core.config import RunConfig
from mgrpo_core.update.mismatch_growth import EARLIER, RECENT, MismatchGrowth, mismatch_growth


def growing_mismatch(history: RunHistory, iteration: int, policies: Iterable[str]) -> dict[str, MismatchGrowth]:
    """Growth by policy, up to and with a committed iteration. Reads its metrics and those of the twelve before it."""
    rows = [history.metrics(number) for number in range(max(0, iteration + 1 - RECENT - EARLIER), iteration + 1)]
    growths = {policy: mismatch_growth([_figure(row, policy) for row in rows]) for policy in policies}
    return {policy: growth for policy, growth in growths.items() if growth is not None}


def mismatch_advice(policy: str, growth: MismatchGrowth, config: RunConfig, metrics: Mapping[str, float]) -> str:
    """What grew, and what to do about it under this config; `metrics` are the newest iteration's."""
    figures = f"update/{policy}"
    most, share = metrics.get(f"{figures}/mismatch_max", 0), metrics.get(f"{figures}/effective_sample_share", 0)
    gap = f"{growth.recent:.3g} nats a token (median of {RECENT} iterations), before by {growth.earlier:.3g}"
    parts = [
        f"Policy {policy!r}: sampler and trainer drift apart.",
        f"Their log-probs differ by {gap}; at most by {most:.3g} now; effective sample share {share:.3g}.",
    ]
    correction = config.loss.correction
    if config.update.old_logprobs == "sampler":
        parts.append("Set update.old_logprobs: trainer and loss.correction.mode: truncate.")
    elif correction.mode == "none":
        parts.append("Nothing corrects for it: set loss.correction.mode: truncate (or mask), level: token.")
    else:
        limited = metrics.get(f"{figures}/corrected_share", 0)
        parts.append(
            f"loss.correction ({correction.mode}, {correction.level}) limits {limited:.1%} of the tokens; a lower cap "
            "limits more."
        )
    parts.append(f"Lower policies.{policy}.optimizer.lr.")
    if config.policies[policy].dtype == "bfloat16":
        parts.append(f"Or compute in float32: policies.{policy}.dtype.")
    elif config.policies[policy].servers:
        parts.append("In float32 this much is no rounding: look for a server with another dtype or quantisation.")
    parts.append("A run continues under such a change with --accept-config-change.")
    return " ".join(parts)


def _figure(row: Mapping[str, float], policy: str) -> float | None:
    """None where the policy took no step: there was nothing to compare."""
    if not row.get(f"update/{policy}/optimizer_steps"):
        return None
    return row.get(f"update/{policy}/mismatch_mean")
