"""What can be wrong with a checkpoint folder, as kinds that a caller may tell apart. Each message is a sentence."""


class CheckpointError(ValueError):
    """Anything wrong with the content of a checkpoint."""


class FormatError(CheckpointError):
    """A file is not what its format demands: truncated, overlapping, not JSON."""


class IndexFileError(CheckpointError):
    """The index of a sharded checkpoint disagrees with itself or with its shards."""


class MismatchError(CheckpointError):
    """The tensors are not the ones that the configuration calls for."""


class UnsafePathError(CheckpointError):
    """A name in the checkpoint points outside its folder or at something that is not a plain file."""


class UnsupportedError(CheckpointError):
    """A kind that is not implemented: model type, rope, activation, quantization, dtype."""


class ConfigError(CheckpointError):
    """A configuration value is missing, of the wrong type, impossible or contradictory."""


class UserError(ValueError):
    """Something the caller can put right: the message is one sentence that names the value and what would be right."""
