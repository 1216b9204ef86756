"""Ports for local services: refuse those in use before anything starts, and find free ones."""

import random
import socket
from dataclasses import replace

from infra.deploy.local.settings import LocalSettings
from mgrpo_core.errors import ConfigError

HOST = "127.0.0.1"
# Below the range that systems take for outgoing connections, so that none of those gets in between choice and use.
_RANGE = range(15_000, 32_000)
_TRIES = 200
_INNER_S3_PORTS = 7
_TITLES = {"server": "Prefect server", "s3": "S3 server", "mlflow": "MLflow server", "postgres": "PostgreSQL"}


def settle_ports(settings: LocalSettings) -> LocalSettings:
    """The same settings with every port that will be used given and free.

    Raises: ConfigError that names every port in use, its service and the option that changes it.
    """
    used = [*settings.services, *(["postgres"] if needs_postgres(settings) else [])]
    wanted = {name: getattr(settings.ports, name) for name in used}
    taken = [name for name, port in wanted.items() if port and not _is_free(port)]
    if taken:
        raise ConfigError(
            f"In use already on {HOST}: "
            + ", ".join(f"port {wanted[name]} ({_TITLES[name]}; --{name}-port)" for name in taken)
            + ". Nothing was started. Stop what listens there, or choose another port with the option named (0 = any)."
        )
    given = [port for port in wanted.values() if port]
    if len(set(given)) < len(given):
        raise ConfigError(f"Ports {wanted}: one is given twice. Give each service a port of its own (0 = any).")
    free = _free_ports(_INNER_S3_PORTS + len(wanted), without=given)
    chosen = {name: port or free.pop() for name, port in wanted.items()}
    inner = tuple(free[:_INNER_S3_PORTS])
    return replace(settings, ports=replace(settings.ports, **chosen, s3_inner=inner))


def needs_postgres(settings: LocalSettings) -> bool:
    """Whether a PostgreSQL server is among what runs."""
    return "server" in settings.services and settings.database == "postgres"


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connection is only winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _free_ports(count: int, *, without: list[int]) -> list[int]:
    # From the system's entropy: two that start at the same moment must not choose alike.
    candidates = random.SystemRandom().sample(_RANGE, _TRIES)
    free = [port for port in candidates if port not in without and _is_free(port)]
    if len(free) < count:
        raise ConfigError(f"Fewer than {count} of {_TRIES} ports tried on {HOST} are free. Stop what holds them.")
    return free[:count]
