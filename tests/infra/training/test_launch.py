"""Which of the many things that fail when one rank does is told."""

from infra.training.launch import what_ended
from infra.training.rank_reports import RankError
from mgrpo_core.errors import InfrastructureError, NonFiniteError

# torchrun 2.13 after `kill -9` of rank 1
LOG = """Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 24759)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 24759
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 24760)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 24760
"""
TERMINATED = LOG.split("Root Cause")[0]
LOST = RankError(2.0, "InfrastructureError", "rank 0 failed with RuntimeError: Connection closed by peer", sure=False)
KNOWN = RankError(1.0, "NonFiniteError", "trajectory x: no number", sure=True)


def test_a_killed_rank_comes_before_what_another_makes_of_its_loss():
    error = what_ended("main", 1, LOG, LOST)
    assert type(error) is InfrastructureError
    assert "(Signal 9 (SIGKILL) received by PID 24760). Where it was killed, memory most likely ran out" in str(error)


def test_what_a_rank_knows_comes_before_signals():
    assert type(what_ended("main", 1, LOG, KNOWN)) is NonFiniteError


def test_a_rank_that_torchrun_ends_was_not_killed():
    assert str(what_ended("main", 1, TERMINATED, LOST)) == LOST.message


def test_without_any_word_the_log_is_named():
    assert "torchrun ended with 1; its last lines are in the log" in str(what_ended("main", 1, "", None))
