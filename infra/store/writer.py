"""Who writes: told apart from every other writer, and recognisable to people."""

import os
import secrets
import socket


def new_writer(label: str = "mgrpo") -> str:
    """A name that no other call gives: `<label> (process <pid> on <host>, <random token>)`.

    Args:
        label: what people call the writer, such as a flow run's name.
    """
    return f"{label} (process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(4)})"
