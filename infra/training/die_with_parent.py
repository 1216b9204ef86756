"""Run a command that does not outlive the process that started it: `python die_with_parent.py CMD …`.

On Linux the kernel sends SIGKILL when the *thread* that started this process ends, however it ends; the setting
survives exec. Elsewhere only a parent that is gone already is noticed. The parent's id comes in the environment, and
the command finds its own there, so that what it starts in the same way knows its parent too.
"""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

_PARENT = "MGRPO_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def bound_to_this_process(command: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """The command line that runs `command` for no longer than this process lives; names this one in `environment`."""
    environment[_PARENT] = str(os.getpid())
    return bound(command)


def bound(command: Sequence[str]) -> list[str]:
    """The same for a process that was itself started so, and hands its environment on."""
    # By its file and isolated: a folder named `infra` where the user stands is none of ours.
    return [sys.executable, "-IS", str(Path(__file__).resolve()), *command]


def main(command: Sequence[str]) -> None:
    """Ask for the signal, and become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(os.environ[_PARENT]):
        sys.exit("die_with_parent: the process that started this one is gone already.")
    os.environ[_PARENT] = str(os.getpid())
    os.execvp(command[0], list(command))  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
