"""What an update reports."""

from dataclasses import dataclass

from mgrpo_core.update.metric_sums import LossMetrics


@dataclass(frozen=True, slots=True)
class UpdateMetrics(LossMetrics):
    """What an update did. Finite numbers; token means run over all steps and epochs.

    Attributes:
        loss: mean over the optimiser steps. Near 0 at ratio 1 whatever is learned: watch the gradient norm.
        grad_norm: L2 norm before clipping, mean over the steps.
        grad_norm_max: its maximum.
        trajectories: distinct ones of weight above 0 with a sampled token.
        weight: their total weight.
        optimizer_steps: steps taken. 0 = nothing to train: weights and moments are as before.
        skipped_steps: minibatches without a trajectory, or whose advantages are all 0.
        tokens_computed: tokens of forward and backward passes, padding included; passes without gradient (old and
            reference log-probs) are not in it.
        padding_share: padding as a share of `tokens_computed`.
        lr: learning rate of the last step, or the current one if there was none.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    grad_norm_max: float = 0.0
    trajectories: int = 0
    weight: float = 0.0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    tokens_computed: int = 0
    padding_share: float = 0.0
    lr: float = 0.0
