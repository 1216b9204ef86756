"""One training iteration, stage by stage: what the flow `mgrpo` does.

What M-GRPO (arXiv:2511.13288) adds to GRPO, and where it stands below:
- a rollout is a main trajectory and the sub-agent trajectories it called for: two kinds of stage over one board;
- rollouts delegate in different numbers: `align_trajectories` gives each the same number of slots;
- each agent has its own group per query: `compute_advantages` never compares main with sub;
- each policy is updated on its own, from its own rows and the shared small tables.
What we add to M-GRPO: the tables are the audit log, and an iteration exists only once its manifest does.
"""

import time

from flows.process import resources_of
from mgrpo_core.side_by_side import side_by_side
from tasks.align_trajectories import align_trajectories
from tasks.commit_iteration import commit_iteration
from tasks.compute_advantages import compute_advantages
from tasks.materialize_trajectories import materialize_trajectories
from tasks.measure import measure_iteration
from tasks.open_iteration import opened
from tasks.publish_policy import publish_policy
from tasks.report import report_iteration
from tasks.roll_out import IterationRollouts, main_rollout, sub_agent_invocation
from tasks.roll_out_ahead import rolling_out_ahead
from tasks.score_rewards import score_rewards
from tasks.updates import update_stage


async def compute_iteration(run: str, store: str, iteration: int | None, config: str | None) -> dict[str, float]:
    """Compute a run's next iteration and commit it; returns its metrics. Arguments as the flow `mgrpo` has them."""
    started = time.perf_counter()
    async with resources_of(run, store, config) as resources:
        resources.clock.clear()
        async with opened(resources, iteration) as at:
            rollouts = IterationRollouts(resources, at.iteration, at.query_indices, at.versions)
            await side_by_side(
                main_rollout(resources, rollouts),
                *(sub_agent_invocation(resources, rollouts, agent) for agent in rollouts.stages.sub_agents),
            )
            trajectories = await materialize_trajectories(resources, at)
            rewards = await score_rewards(resources, at, trajectories)
            alignment = await align_trajectories(resources, at, rewards)
            advantages = await compute_advantages(resources, at, rewards, alignment)
            update_policy = update_stage(resources.config)
            async with rolling_out_ahead(resources, at):
                updates = await side_by_side(
                    *(
                        update_policy(resources, at, policy, trajectories, advantages)
                        for policy in resources.config.trained_policies
                    )
                )
            metrics = await measure_iteration(resources, at, trajectories, (rewards, alignment, advantages), updates)
            committed = await commit_iteration(
                resources, at, trajectories, (rewards, alignment, advantages), updates, metrics
            )
        metrics |= await publish_policy(resources, committed)  # the committed file of metrics cannot hold these
        await report_iteration(resources, committed, metrics, time.perf_counter() - started)
        return metrics
