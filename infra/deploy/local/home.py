"""The state folder of `mgrpo up`: what lies where, what may be read by whom, and one command at a time."""

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from infra.deploy.local.settings import LocalSettings
from mgrpo_core.errors import ConfigError

# Unix sockets take 104 characters on macOS and 108 on Linux; supervisord adds a process id while it opens its own.
_LONGEST_SOCKET_FOLDER = 70


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets of a home, made once: data outlive the services, and open with the same keys."""

    postgres_password: str
    s3_access_key: str
    s3_secret_key: str


@dataclass(frozen=True, slots=True)
class Running:
    """What was started from a home."""

    settings: LocalSettings
    sockets: Path
    """Folder of the unix sockets."""


class LocalHome:
    """Paths below a state folder, and the few files that say what runs."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).resolve()
        self.logs = self.folder / "logs"
        self.data = self.folder / "data"
        self.env_file = self.folder / "env"
        self.supervisor_config = self.folder / "supervisord.conf"
        self._keys_file = self.folder / "keys.json"
        self._running_file = self.folder / "running.json"
        self._lock_file = self.folder / "lock"

    def log_of(self, program: str) -> Path:
        """The program's output."""
        return self.logs / f"{program}.log"

    def create(self) -> None:
        """Make the folders. Others may pass through them, where root's database needs that, and list nothing."""
        for folder in (self.folder, self.data, self.logs):
            make_private_folder(folder)
        if os.geteuid() == 0:
            for folder in (self.folder, self.data):
                folder.chmod(0o711)

    @contextmanager
    def alone(self, *, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the home while services are started or stopped.

        Raises: ConfigError if another command does so, and still does after `patience_s`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + patience_s
        with self._lock_file.open("a") as lock:
            while not _is_locked(lock):
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{self.folder}: another `mgrpo up` or `mgrpo down` is starting or stopping these services. "
                        "Wait until it is done, or stop that one with Ctrl-C."
                    )
                time.sleep(0.1)
            yield

    def keys(self) -> Keys:
        """The home's secrets, made at the first call."""
        if not self._keys_file.exists():
            made = Keys(secrets.token_hex(16), secrets.token_hex(10).upper(), secrets.token_urlsafe(30))
            write_private(self._keys_file, json.dumps(asdict(made)))
        try:
            return Keys(**json.loads(self._keys_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._keys_file}: holds no keys ({error}). Restore it, or remove {self.folder} and its data with it."
            ) from None

    def new_running(self, settings: LocalSettings) -> Running:
        """What shall be started; nothing is written yet."""
        if len(str(self.folder)) <= _LONGEST_SOCKET_FOLDER:
            return Running(settings, self.folder / "run")
        return Running(settings, Path(tempfile.gettempdir()) / f"mgrpo-up-{secrets.token_hex(8)}")

    def note_running(self, running: Running) -> None:
        """Write down what is about to start, so that whoever comes next finds and stops it."""
        shutil.rmtree(running.sockets, ignore_errors=True)
        running.sockets.mkdir(mode=0o700)
        note = {"settings": running.settings.to_json(), "sockets": str(running.sockets)}
        write_private(self._running_file, json.dumps(note, indent=1))

    def running(self) -> Running | None:
        """What was noted; None if nothing was started, or stopped since."""
        try:
            raw = json.loads(self._running_file.read_text(encoding="utf-8"))
            return Running(LocalSettings.from_json(raw["settings"]), Path(raw["sockets"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None  # of another version of mgrpo; what it started is found by its mark

    def forget_running(self) -> None:
        """Remove the note and the sockets; call when nothing runs any more."""
        if note := self.running():
            shutil.rmtree(note.sockets, ignore_errors=True)
        self._running_file.unlink(missing_ok=True)

    def write_env(self, environment: Mapping[str, str]) -> None:
        """Write the file for `source`, readable by its owner only."""
        lines = [f"export {name}='{value}'" for name, value in environment.items()]
        write_private(self.env_file, "\n".join(lines) + "\n")


def _is_locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Make a folder, if it is missing, that only its owner can enter."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read, at no moment by anybody else."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600 from its first moment
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)
