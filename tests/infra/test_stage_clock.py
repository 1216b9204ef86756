from infra.stage_clock import StageClock


def test_overlapping_stages_are_work_once_and_gaps_are_nobodys():
    clock = StageClock()
    clock.add("main_rollout", 0.0, 4.0)
    clock.add("sub_agent_invocation", 1.0, 5.0)
    clock.add("align", 6.0, 7.0)
    assert clock.worked() == 6.0  # 0-5 and 6-7
    assert clock.seconds() == {"main_rollout": 4.0, "sub_agent_invocation": 4.0, "align": 1.0}


def test_tasks_of_one_stage_side_by_side_count_from_the_first_start_to_the_last_stop():
    clock = StageClock()
    clock.add("update_policy", 0.0, 3.0)
    clock.add("update_policy", 0.5, 3.5)
    assert clock.seconds() == {"update_policy": 3.5}
    assert clock.worked() == 3.5


def test_a_cleared_clock_has_seen_nothing():
    clock = StageClock()
    clock.add("align", 0.0, 1.0)
    clock.clear()
    assert clock.worked() == 0.0
    assert clock.seconds() == {}
