from mgrpo_core.update.gradients import Gradients
from mgrpo_core.update.update_settings import UpdateSettings
from tests.mgrpo_core.update.small_policies import random_trajectories, small_policy


def gradients_of(count: int, **settings: object) -> Gradients:
    trajectories = random_trajectories(count, segments=True)
    return Gradients(small_policy(), None, trajectories, UpdateSettings(micro_batch_tokens=60, **settings))


def test_scores_before_the_first_step_come_from_the_micro_batches_of_the_first_epoch():  # case B15
    gradients = gradients_of(12)
    first, second = gradients.plan(range(12)), gradients.plan([0, 3, 6, 9])
    passes = gradients.passes_before_first_step([first, second])
    assert passes == list(first.micro_batches)


def test_a_segment_that_only_a_later_epoch_trains_on_is_scored_once():
    gradients = gradients_of(12)
    plans = [gradients.plan([0, 1, 2]), gradients.plan([1, 2, 3]), gradients.plan([3])]
    scored = [segment for segments in gradients.passes_before_first_step(plans) for segment in segments]
    assert len(scored) == len(set(scored))
    assert {segment.trajectory for segment in scored} == {0, 1, 2, 3}


def test_nothing_is_scored_before_the_first_step_where_the_sampler_is_the_old_policy():
    gradients = gradients_of(3, old_logprobs="sampler")
    assert gradients.passes_before_first_step([gradients.plan([0, 1, 2])]) == []


def test_an_idle_pass_has_loss_0_and_gradient_0_everywhere():
    model = small_policy()
    Gradients(model, None, [], UpdateSettings()).idle_loss().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_denominators_are_sums_over_the_minibatch():
    gradients = gradients_of(4)
    found = gradients.denominators([1, 3])
    trajectories = random_trajectories(4, segments=True)
    assert found.weight == trajectories[1].weight + trajectories[3].weight
    assert found.tokens == sum(trajectories[i].weight * trajectories[i].sampled_tokens for i in (1, 3))
