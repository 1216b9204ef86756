"""What-if: the same rollouts under another config, beside what the run made of them."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from infra.credit.advantages import advantages_table
from infra.credit.alignment import alignment_table
from infra.replay.credit import rescored
from infra.replay.credit_changes import AgentChange, credit_changes
from infra.replay.overrides import Variation, variations
from infra.replay.policy_changes import PolicyChange
from infra.replay.verdicts import Through
from infra.store.export_record import require_policies
from infra.store.runs import StoredRun, open_store, require_run
from infra.store.stored_iteration import StoredIteration, open_stored
from mgrpo_core.config import RunConfig


@dataclass(frozen=True, slots=True)
class Tried:
    """One variation, `key=value` each: what it does to credit, agent by agent, and to updates, policy by policy."""

    changes: tuple[str, ...]
    agents: tuple[AgentChange, ...]
    policies: tuple[PolicyChange, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What an iteration would have been. `policies` of each variation are empty through `advantages`."""

    run: str
    iteration: int
    through: Through
    tried: tuple[Tried, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def what_if_stored(store: str, run: str, iteration: int, settings: Sequence[str], through: Through) -> WhatIf:
    """`what_if` of a run by its name.

    Raises: StoreError if there is no such run, ConfigError if the iteration is not committed or a setting is refused.
    """
    found = require_run(open_store(store), run)
    with tempfile.TemporaryDirectory(prefix="mgrpo-policies-") as cache:
        return asyncio.run(what_if(found, iteration, settings, through=through, cache=Path(cache)))


async def what_if(run: StoredRun, iteration: int, settings: Sequence[str], *, through: Through, cache: Path) -> WhatIf:
    """Try every combination of the settings on a committed iteration's rollouts.

    Args:
        run: where it is.
        iteration: its number.
        settings: see `variations`.
        through: `advantages` for credit alone, without a model.
        cache: where policy versions are downloaded to from a store that is not local.

    Raises: ConfigError, TableIntegrityError.
    """
    stored = open_stored(run, iteration)
    if through == "update":
        require_policies(run.files, run.name)
    tried = variations(stored.config, settings)
    before = stored.table("advantages")
    advantages = [await advantages_under(stored, one.config) for one in tried]
    credit = [credit_changes(before, after, one.config) for one, after in zip(tried, advantages, strict=True)]
    updates = _updates(stored, tried, advantages, cache) if through == "update" else [()] * len(tried)
    found = (Tried(*parts) for parts in zip((one.words for one in tried), credit, updates, strict=True))
    return WhatIf(run.name, iteration, through, tuple(found))


async def advantages_under(stored: StoredIteration, config: RunConfig) -> pa.Table:
    """The advantages table of the stored rollouts under another config."""
    rewards = await rescored(stored, config) if _scores(config) != _scores(stored.config) else stored.table("rewards")
    query_ids = stored.table("queries", ["query_id"]).column(0).to_pylist()
    slots = alignment_table(config, stored.manifest.iteration, query_ids, rewards)
    return advantages_table(config, rewards, slots)


def _scores(config: RunConfig) -> list[object]:
    """What rewards depend on."""
    return [(name, agent.judge, agent.verifier, config.reward_of(name)) for name, agent in config.agents.items()]


def _updates(
    stored: StoredIteration, tried: Sequence[Variation], advantages: Sequence[pa.Table], cache: Path
) -> list[tuple[PolicyChange, ...]]:
    from infra.replay.what_if_updates import policy_change, stored_update  # torch

    found: list[list[PolicyChange]] = [[] for _ in tried]
    for policy in stored.config.trained_policies:
        update = stored_update(stored, policy, cache)
        for place, (variation, table) in enumerate(zip(tried, advantages, strict=True)):
            found[place].append(policy_change(stored, update, variation.config, table, cache))
    return [tuple(changes) for changes in found]
