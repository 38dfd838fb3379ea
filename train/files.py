"""Files that are either complete or absent: written beside their place, flushed to disk, then renamed into it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from params.io.files import sync

WRITING = ".writing-"  # begins the names of unfinished files


def move_into_place(temporary: Path, path: Path) -> None:
    """Replace `path` by the finished file `temporary` (same file system), so that no reader ever sees half of it."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(temporary)` make the file, then rename it to `path`. A failed or killed write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=WRITING) as folder:
        temporary = Path(folder) / path.name
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors' writer leaves files to the owner alone
        write(temporary)
        temporary.chmod(mode)
        move_into_place(temporary, path)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
