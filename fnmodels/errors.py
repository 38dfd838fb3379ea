"""Exception classes: the kinds of errors in checkpoints, errors that the user can fix, and too little memory."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# in the RuntimeErrors of torch: its allocators on the CPU, mmap, and CUDA
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")


def printable(text: str) -> str:
    """`text` with unprintable characters escaped: names in a file may hold control codes or lone surrogates."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class PrintableError(ValueError):
    """An error whose message may quote a stranger's file, so that what would steer a terminal is escaped in it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class CheckpointError(PrintableError):
    """Base class of all errors in the content of a checkpoint."""


class FormatError(CheckpointError):
    """A file violates its format: truncated, overlapping tensors, not JSON."""


class IndexFileError(CheckpointError):
    """The index of a sharded checkpoint disagrees with itself or with its shards."""


class MismatchError(CheckpointError):
    """Names, shapes or dtypes of tensors differ from those that the config requires."""


class UnsafePathError(CheckpointError):
    """A name in the checkpoint leads outside its folder or to something other than a regular file."""


class UnsupportedError(CheckpointError):
    """A feature that is not implemented: a model type, rope, activation, quantization or dtype."""


class ConfigError(CheckpointError):
    """A config value is missing, of the wrong type, impossible or contradictory."""


class UserError(PrintableError):
    """An error that the user can fix: the message is one sentence that names the value and what would be right."""


class PositionWarning(UserWarning):
    """Positions go past the range that the model's rotary tables are for. An error where a filter makes it one:
    warnings.filterwarnings("error", category=fnmodels.errors.PositionWarning)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, of whatever library, says that there is not enough memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


@contextmanager
def memory_for(folder: Path) -> Iterator[None]:
    """Turns an error for want of memory into a MemoryError that names the folder which is being loaded."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(printable(f"{folder}: there is not enough memory to load this")) from error
