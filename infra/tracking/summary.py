"""What people are told of an iteration: one line, one page, one table. docs/metrics.md has the names of the numbers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from infra.tracking.finite import finite_or_none
from mgrpo_core.update.mismatch_growth import MismatchGrowth

MOST_ROWS = 200  # a table artifact is one database row, which the Prefect UI loads whole
MISSING = "–"


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Version numbers of a policy before and after an iteration; equal where there was nothing to train."""

    before: int
    after: int
    sha256: str


@dataclass(frozen=True, slots=True)
class IterationSummary:
    """An iteration in numbers.

    Attributes:
        seconds: wall time of the whole iteration.
        metrics: by the names of docs/metrics.md; one that is not there was not measured.
        changes: by policy.
        provenance: label -> text, such as where the store is and which code ran.
        drifting: policies whose sampler and trainer drift apart.
        advice: what to do about it, in sentences.
    """

    run: str
    iteration: int
    seconds: float
    main_agent: str
    sub_agents: tuple[str, ...]
    metrics: Mapping[str, float]
    changes: Mapping[str, PolicyChange]
    provenance: Mapping[str, str] = field(default_factory=dict)
    drifting: Mapping[str, MismatchGrowth] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.run}-{self.iteration:04d}"

    @property
    def agents(self) -> tuple[str, ...]:
        return (self.main_agent, *self.sub_agents)


def console_line(summary: IterationSummary) -> str:
    """`quickstart-0007  6.1 s  success 0.312  main reward 0.288  searcher reward 0.410, calls 1.9  grad main 0.52`.

    Always the same columns, with a dash for what was not measured; what needs attention follows after `!`.
    """
    metrics = summary.metrics
    columns = [summary.name, f"{summary.seconds:.1f} s", f"success {_fixed(metrics.get('success'), 3)}"]
    columns.append(f"{summary.main_agent} reward {_fixed(metrics.get(f'{summary.main_agent}/reward'), 3)}")
    for agent in summary.sub_agents:
        reward, calls = metrics.get(f"{agent}/reward"), metrics.get(f"{agent}/invocations_mean")
        columns.append(f"{agent} reward {_fixed(reward, 3)}, calls {_fixed(calls, 1)}")
    columns += [f"grad {policy} {_fixed(metrics.get(f'update/{policy}/grad_norm'), 2)}" for policy in summary.changes]
    columns += [f"! {concern}" for concern in concerns(summary)]
    return "  ".join(columns)


def concerns(summary: IterationSummary) -> tuple[str, ...]:
    """What somebody should look at, in words; empty where nothing is odd.

    Rollouts that our side lost; more than 5 % of rollouts beyond d, where alignment drops trajectories; 90 % or more
    of the groups without variance, or of the rollouts without a delegation, where little can be learned; a policy that
    took no step, or whose sampler and trainer drift apart; metrics that are NaN or infinite.
    """
    return tuple(_concerns(summary))


def _concerns(summary: IterationSummary) -> Iterable[str]:
    metrics = summary.metrics
    for agent in summary.agents:
        if lost := metrics.get(f"{agent}/infra_failed", 0):
            yield f"{agent}: {lost:.0f} trajectories lost to infrastructure"
        if (flat := metrics.get(f"{agent}/zero_variance_groups", 0)) >= 0.9:
            yield f"{agent}: {flat:.0%} of groups without variance"
        if (beyond := metrics.get(f"{agent}/rollouts_beyond_d", 0)) > 0.05:
            yield f"{agent}: {beyond:.0%} of rollouts delegate more than d times"
        if (without := metrics.get(f"{agent}/rollouts_without", 0)) >= 0.9:
            yield f"{agent}: {without:.0%} of rollouts never delegate"
    for policy, change in summary.changes.items():
        if change.before == change.after:
            yield f"policy {policy} took no step"
        if growth := summary.drifting.get(policy):
            yield f"policy {policy}: mismatch grows, {growth.earlier:.3g} → {growth.recent:.3g}"
    if odd := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
        yield f"not finite: {', '.join(odd[:3])}{f' and {len(odd) - 3} more' if len(odd) > 3 else ''}"


_AGENT_COLUMNS = ("trajectories", "reward", "format", "correct", "main_correct", "expert", "invocations_mean")
_AGENT_COLUMNS += ("zero_variance_groups", "infra_failed", "policy_failed", "sampled_tokens_mean")
_POLICY_COLUMNS = ("loss", "grad_norm", "approx_kl", "clip_fraction_low", "clip_fraction_high", "entropy")
_POLICY_COLUMNS += ("mismatch_mean", "mismatch_max", "effective_sample_share", "corrected_share")
_POLICY_COLUMNS += ("optimizer_steps", "lr")


def markdown_summary(summary: IterationSummary) -> str:
    """A page for a Prefect artifact: concerns, agents, policies, provenance. Columns that nobody has are left out."""
    metrics = summary.metrics
    rate = _fixed(metrics.get("success"), 3)
    lines = [
        f"# {_cell(summary.run)}, iteration {summary.iteration}",
        "",
        f"Success {rate} in {summary.seconds:.1f} s.",
        "",
    ]
    if odd := concerns(summary):
        lines += [*(f"- **{_cell(concern)}**" for concern in odd), *(f"- {_cell(one)}" for one in summary.advice), ""]
    lines += _table("agent", {agent: f"{agent}/" for agent in summary.agents}, _AGENT_COLUMNS, metrics, {})
    versions = {policy: f"{change.before} → {change.after}" for policy, change in summary.changes.items()}
    owners = {policy: f"update/{policy}/" for policy in summary.changes}
    lines += _table("policy", owners, _POLICY_COLUMNS, metrics, {"version": versions})
    notes = {**summary.provenance, **{f"policy {p}": change.sha256[:12] for p, change in summary.changes.items()}}
    lines += [f"- {_cell(label)}: `{_cell(text)}`" for label, text in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def table_rows(metrics: Mapping[str, float]) -> list[dict[str, str | float | None]]:
    """Rows `{"metric": name, "value": number or None}` sorted by name, six significant digits; at most 200.

    What is NaN or infinite is None. Where rows had to be cut, the last one says how many.
    """
    rows: list[dict[str, str | float | None]] = [
        {"metric": name, "value": _six_digits(value)} for name, value in sorted(metrics.items())
    ]
    if len(rows) <= MOST_ROWS:
        return rows
    kept = rows[: MOST_ROWS - 1]
    return [*kept, {"metric": f"and {len(rows) - len(kept)} more, in the run's tables and in MLflow", "value": None}]


def _table(
    corner: str,
    prefixes: Mapping[str, str],
    wanted: Iterable[str],
    metrics: Mapping[str, float],
    texts: Mapping[str, Mapping[str, str]],
) -> list[str]:
    if not prefixes:
        return []
    columns = [name for name in wanted if any(prefix + name in metrics for prefix in prefixes.values())]
    head = [corner, *texts, *(name.replace("_", " ") for name in columns)]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for owner, prefix in prefixes.items():
        said = [text[owner] for text in texts.values()]
        lines.append(_row([owner, *said, *(_general(metrics.get(prefix + name)) for name in columns)]))
    return [*lines, ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """One line of text that ends no table cell and no inline code: readers of Markdown disagree on escaped bars."""
    return " ".join(text.replace("|", "¦").replace("`", "'").split())


def _fixed(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _general(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


def _six_digits(value: float) -> float | None:
    finite = finite_or_none(value)
    return None if finite is None else float(f"{finite:.6g}")
