"""What `mgrpo up` is asked for, as a record that is also kept beside what runs."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Database = Literal["postgres", "sqlite"]
Service = Literal["server", "s3", "mlflow"]

SERVICES: tuple[Service, ...] = ("server", "s3", "mlflow")


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on 127.0.0.1; 0 = any that is free."""

    server: int = 4200
    s3: int = 8333
    mlflow: int = 5000
    postgres: int = 54320
    s3_inner: tuple[int, ...] = ()
    """Of SeaweedFS's other parts, which nobody but itself speaks to. Empty = any that are free."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Which services run, and where."""

    services: tuple[Service, ...] = SERVICES
    database: Database = "postgres"
    """Of the Prefect server; runs only with it."""
    pools: tuple[str, ...] = ()
    """Work pools to start a worker for; needs the server."""
    ports: Ports = field(default_factory=Ports)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "LocalSettings":
        """The inverse of `to_json`. Raises KeyError or TypeError for anything else."""
        ports = Ports(**{**raw["ports"], "s3_inner": tuple(raw["ports"]["s3_inner"])})
        return cls(tuple(raw["services"]), raw["database"], tuple(raw["pools"]), ports)
