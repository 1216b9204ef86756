"""Two starts of one iteration at the same moment: one computes and commits it, the other leaves it to it.

`MGRPO_RACES=50 pytest tests/flows/test_race.py` for more rounds than continuous integration has time for.
"""

import os

from tests.flows.program import Trap
from tests.flows.stored import manifest_of, versions_of

ROUNDS = int(os.environ.get("MGRPO_RACES", "3"))
TOGETHER = Trap("tasks.open_iteration:take_lease", action="tests.flows.faulty:meet_the_other")


def test_of_two_starts_at_the_same_moment_one_commits_and_the_other_says_who_computes(program, team, tmp_path):
    for number in range(ROUNDS):
        run = f"race{number}"
        command = ("train", team / "run.yaml", "--store", tmp_path, "--run", run, "--iterations", 1)
        both = [program.start(*command, traps=[TOGETHER]) for _ in range(2)]
        ends = sorted((one.wait() for one in both), key=lambda end: end.code)
        assert [end.code for end in ends] == [0, 2], [end.err for end in ends]
        assert f"iteration 0 of run '{run}' is being computed by {run}-0000 (process " in ends[1].err
        assert manifest_of(tmp_path, run=run)["iteration"] == 0
        for policy in ("main", "sub"):
            assert versions_of(tmp_path, policy, run=run)[0] == "00000000"
            assert not (tmp_path / run / "aside").exists()
