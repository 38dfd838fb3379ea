"""A Unix socket in place of a file."""

import os
import socket
from pathlib import Path


def make_socket(path: Path) -> None:
    """Binds a socket to the path, which stays when the socket is closed."""
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # the name of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)
