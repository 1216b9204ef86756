"""What may go wrong at a server, told apart by what helps."""

from mgrpo_core.errors import PolicyServerError


class ServerDownError(PolicyServerError):
    """The server does not answer, or fails: asking again, or asking another one, may help."""


class ServerFailedError(ServerDownError):
    """The server is there and failed at this request: what it holds is not in doubt."""


class ServerUnfitError(PolicyServerError):
    """The server answers, but not as this run needs it: asking it again does not help, another one may."""


class NotThereError(ServerUnfitError):
    """The server knows no such route, or no model or adapter of this name."""
