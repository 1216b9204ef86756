"""One local service as a process: how to start it, how to know that it answers, how to stop it."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mgrpo_core.errors import ConfigError

# supervisord's files have no way to quote these.
_UNQUOTABLE = "\"';#\n"


@dataclass(frozen=True, slots=True)
class Program:
    """A process that supervisord keeps running.

    `answers` may raise anything while the service is not there yet: that means no.
    """

    name: str
    title: str
    """For people, in messages."""
    place: str
    """Where it answers: a URL, or host and port."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """On top of what supervisord has; programs share nothing else."""
    directory: Path
    answers: Callable[[float], bool] = field(repr=False)
    """Gets the time when the process was started, in seconds since the epoch."""
    deadline_s: float
    """Longest wait for the first answer; generous, since two cores may be busy with other things."""
    step: int
    """Programs start step by step, each step when the one before answers, and stop the other way round."""
    user: str | None = None
    stop_signal: Literal["TERM", "INT"] = "TERM"
    stop_wait_s: int = 10
    """Then SIGKILL."""
    stop_as_group: bool = True

    def section(self, log: Path) -> str:
        """Its part of supervisord's config.

        Raises: ConfigError if a path or value has a character that the file cannot hold.
        """
        environment = ",".join(f'{_checked(name)}="{_checked(value)}"' for name, value in self.environment.items())
        lines = [
            f"[program:{self.name}]",
            f"command={_escaped(shlex.join(_checked(word) for word in self.command))}",
            f"environment={_escaped(environment)}",
            f"directory={_escaped(_checked(str(self.directory)))}",
            "autostart=false",
            "autorestart=true",
            "startsecs=1",
            f"stopsignal={self.stop_signal}",
            f"stopwaitsecs={self.stop_wait_s}",
            f"stopasgroup={str(self.stop_as_group).lower()}",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={_escaped(_checked(str(log)))}",
            "stdout_logfile_backups=1",
            *([f"user={self.user}"] if self.user else []),
        ]
        return "\n".join(lines) + "\n"


def _checked(text: str) -> str:
    if found := sorted(set(text) & set(_UNQUOTABLE)):
        raise ConfigError(
            f"{text!r}: supervisord's config file cannot hold {' '.join(map(repr, found))}. "
            "Use folders and names without them (--home chooses the state folder)."
        )
    return text


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
