"""Settings that several methods have."""

from collections.abc import Mapping

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import Fields, shown

# Names of lists of modules: what is quantized is determined from the tensors in the files.
MODULES = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "exclude_modules", "dequantize")


def bits_of(fields: Fields, name: str, *read: int) -> int:
    bits = fields.integer(name)
    if bits not in read:
        raise UnsupportedError(f"{fields.where}: {name!r} is {bits}; supported are {', '.join(map(str, read))}.")
    return bits


def group_of(fields: Fields) -> int:
    """Inputs that share a scale; 0 for the -1 that stands for all."""
    size = fields.integer("group_size", low=-1)
    if size == 0:
        raise ConfigError(f"{fields.where}: 'group_size' is 0, but must be -1 (all inputs) or above 0.")
    return max(0, size)


def refuse_rotation(fields: Fields) -> None:
    """UnsupportedError for files of GPTQModel whose products take inputs turned by a Hadamard matrix."""
    meta = fields.take("meta", None)
    for name, rotation in (
        ("rotation", fields.take("rotation", None)),
        ("meta.rotation", meta.get("rotation") if isinstance(meta, Mapping) else None),
    ):
        if rotation:
            raise UnsupportedError(
                f"{fields.where}: {name!r} is {shown(rotation)}: weights are rotated, and inputs of down_proj would "
                "be multiplied by a Hadamard matrix, which is not done here."
            )
