"""Single trajectories' gradients of a stored update, exactly as it computed its loss."""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.blame.ranking import WholeGradient
from infra.replay.updates import policy_inputs, update_threads
from infra.replay.what_if_updates import credited, loss_gradient
from infra.store.layout import update_file
from infra.store.stored_iteration import StoredIteration
from mgrpo_core.update.gradient_shares import GradientShare, gradient_norm, gradient_share


def gradient_shares(
    stored: StoredIteration, policy: str, trajectory_ids: Sequence[str], cache: Path
) -> tuple[WholeGradient, dict[str, GradientShare]]:
    """Their parts of the gradient of the update's loss over all trajectories, at the version that is updated.

    A trajectory that is not in the loss has gradient 0. Costs a pass over all of the policy's tokens, and one more over
    those of each trajectory; holds two gradients at a time.

    Raises: TableIntegrityError where a version or a table is missing or damaged.
    """
    inputs = policy_inputs(stored, stored.config, policy, cache)
    figures = json.loads(stored.files.read(update_file(*stored.place, policy)))["figures"]
    loss = loss_gradient(inputs, stored.config, credited(stored, stored.config, policy, stored.table("advantages")))
    with update_threads(stored.config):
        whole = loss.whole()
        shares = {one: gradient_share(loss.part(one), whole) for one in trajectory_ids}
    found = WholeGradient(gradient_norm(whole), figures["grad_norm"], figures["optimizer_steps"])
    return found, shares
