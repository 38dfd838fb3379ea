"""Exception classes: the kinds of errors in checkpoints, and errors that the user can fix."""


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
