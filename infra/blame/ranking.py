"""The trajectories that moved a policy, ranked: from the small tables, without a token and without torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.blame.made_by import iteration_that_made
from infra.blame.traced import Ranking, Traced
from infra.store.runs import StoredRun
from infra.store.stored_iteration import StoredIteration, open_stored
from mgrpo_core.errors import ConfigError, TableIntegrityError

if TYPE_CHECKING:
    from mgrpo_core.update.gradient_shares import GradientShare

_REWARD = (
    "trajectory_id", "agent", "query_position", "query_id", "rollout_index", "agent_path", "call_index", "reward",
)  # fmt: skip
_CREDIT = ("trajectory_id", "agent", "advantage", "weight", "included", "excluded_reason")


@dataclass(frozen=True, slots=True)
class Blamed(Traced):
    """A trajectory of a policy's agents, and how hard it pulled.

    Attributes:
        pull: weight x advantage, 0.0 where it is not in the loss. Above 0 = the policy was moved towards it.
        share: |pull| of the sum of |pull| over the policy's trajectories, 0 to 1.
        excluded_reason: why it is not in the loss; None where it is.
        gradient: its part of the update's gradient; None where it was not asked for.
    """

    advantage: float
    weight: float
    pull: float
    share: float
    excluded_reason: str | None
    gradient: "GradientShare | None" = None


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """The gradient that the shares are of.

    Attributes:
        norm: L2 norm.
        run_norm: as the run's update measured it, a mean over its steps. Equal with a single step, up to rounding.
        optimizer_steps: that the run's update took.
    """

    norm: float
    run_norm: float
    optimizer_steps: int


@dataclass(frozen=True, slots=True)
class BlameReport(Ranking[Blamed]):
    """Who moved a policy from one version to the next.

    Attributes:
        trajectories: of the policy's agents.
        in_loss: of them, those that entered the loss.
        ranked: by |pull|; by gradient norm where that was asked for.
        whole: None where gradients were not asked for.
    """

    from_version: int
    to_version: int
    trajectories: int
    in_loss: int
    whole: WholeGradient | None = None


def blame(
    run: StoredRun,
    policy: str,
    *,
    store: str,
    version: int | None = None,
    iteration: int | None = None,
    top: int = 10,
    named: Sequence[str] = (),
    gradients: bool = False,
    cache: Path | None = None,
) -> BlameReport:
    """Rank a policy's trajectories.

    Args:
        run: where it is.
        policy: whose update.
        store: its address, for the links.
        version: that the update made; None with an iteration, or for the newest.
        iteration: whose update, in place of a version.
        top: how many trajectories.
        named: these instead: ids, or beginnings of ids.
        gradients: rank those by the norm of their part of the gradient.
        cache: where policy versions are downloaded to; needed for gradients.

    Raises:
        ConfigError: no such policy, version, iteration or trajectory, or the policy is not trained.
        TableIntegrityError: what is stored is damaged.
    """
    stored = open_update(run, policy, version, iteration)
    step = stored.manifest.policies[policy]
    everyone = trajectories_of_policy(stored, policy)
    chosen = _named(everyone, named) if named else everyone[:top]
    whole = None
    if gradients:
        from infra.blame.gradients import gradient_shares  # torch

        assert cache is not None
        whole, shares = gradient_shares(stored, policy, [one.trajectory_id for one in chosen], cache)
        chosen = [replace(one, gradient=shares[one.trajectory_id]) for one in chosen]
        chosen.sort(key=lambda one: (-shares[one.trajectory_id].norm, one.trajectory_id))
    return BlameReport(
        store=store,
        run=run.name,
        policy=policy,
        iteration=stored.manifest.iteration,
        from_version=step.from_version,
        to_version=step.to_version,
        trajectories=len(everyone),
        in_loss=sum(one.excluded_reason is None for one in everyone),
        ranked=tuple(chosen),
        whole=whole,
    )


def open_update(run: StoredRun, policy: str, version: int | None, iteration: int | None) -> StoredIteration:
    """The iteration that made a version, or the given one.

    Raises: ConfigError if both are given, there is no such thing, or the policy was not trained.
    """
    if version is not None and iteration is not None:
        raise ConfigError("--version and --iteration both say which update is meant. Give one of them.")
    stored = open_stored(run, iteration_that_made(run, policy, version) if iteration is None else iteration)
    config = stored.config
    if policy not in config.policies or policy not in stored.manifest.policies:
        raise ConfigError(f"run {run.name!r} has no policy {policy!r}. It has {', '.join(config.policies)}.")
    if policy not in config.trained_policies:
        trained = ", ".join(config.trained_policies) or "none"
        raise ConfigError(f"no agent of policy {policy!r} is trainable: no update moves it. Trained: {trained}.")
    return stored


def trajectories_of_policy(stored: StoredIteration, policy: str) -> list[Blamed]:
    """All trajectories of a policy's trainable agents, hardest pull first."""
    agents = stored.config.agents_of(policy)
    rewards = {row["trajectory_id"]: row for row in _rows(stored, "rewards", _REWARD, agents)}
    credit = list(_rows(stored, "advantages", _CREDIT, agents))
    pulls = [row["weight"] * row["advantage"] if row["included"] else 0.0 for row in credit]
    total = sum(map(abs, pulls))
    found: list[Blamed] = []
    for row, pull in zip(credit, pulls, strict=True):
        about = rewards.get(row["trajectory_id"])
        if about is None:
            raise TableIntegrityError(
                f"{stored.files.uri(stored.ref('advantages.parquet').path)}: trajectory {row['trajectory_id']} has no "
                "row in the rewards table. Run `mgrpo verify`."
            )
        share = abs(pull) / total if total else 0.0
        left_out = None if row["included"] else row["excluded_reason"]
        found.append(
            Blamed(**about, advantage=row["advantage"], weight=row["weight"], pull=pull, share=share,
                   excluded_reason=left_out)
        )  # fmt: skip
    return sorted(found, key=lambda one: (-abs(one.pull), one.trajectory_id))


def _rows(
    stored: StoredIteration, table: str, columns: Sequence[str], agents: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    return (row for row in stored.table(table, columns).to_pylist() if row["agent"] in agents)


def _named(everyone: Sequence[Blamed], named: Sequence[str]) -> list[Blamed]:
    """Those whose id begins with one of the names, in rank order."""
    chosen: set[str] = set()
    for name in named:
        found = [one.trajectory_id for one in everyone if name and one.trajectory_id.startswith(name)]
        if len(found) != 1:
            many = f"{len(found)} of them" if found else "none of them"
            raise ConfigError(
                f"--trajectory {name!r}: {many} among the {len(everyone)} trajectories of this policy's update. "
                "Give an id, or enough of its beginning; `--json` prints them whole."
            )
        chosen.add(found[0])
    return [one for one in everyone if one.trajectory_id in chosen]
