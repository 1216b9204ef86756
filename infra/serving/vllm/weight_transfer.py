"""How all weights of a version come to a server. Adapters are read from a disk in any case."""

from typing import TYPE_CHECKING, Protocol

from infra.serving.vllm.server_api import ServerApi

if TYPE_CHECKING:
    from infra.serving.vllm.replica import ServedVersion


class WeightTransfer(Protocol):
    """A way to a server."""

    async def check(self, api: ServerApi) -> None:
        """Raise ConfigError where no weights can come to the server this way, before there are any to send."""
        ...

    async def load(self, api: ServerApi, wanted: "ServedVersion") -> None:
        """Have the server replace all its weights by those of a version."""
        ...


class ByFolder:
    """The server reads them from a disk that it sees."""

    async def check(self, api: ServerApi) -> None:
        """That it sees the disk shows when it reads."""

    async def load(self, api: ServerApi, wanted: "ServedVersion") -> None:
        await api.load_weights(wanted.folder)
