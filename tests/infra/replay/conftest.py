"""The small team and the command `mgrpo`, as the tests of flows have them."""

from tests.flows.conftest import program, team

__all__ = ["program", "team"]
