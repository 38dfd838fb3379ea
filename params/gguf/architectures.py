"""The architectures that are read, and the content of a config.json from a file of one."""

from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import Architecture
from .dense import DENSE
from .header import GgufFile
from .hybrid import HYBRID
from .latent import LATENT
from .metadata import Metadata
from .routed import ROUTED

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({**DENSE, **ROUTED, **LATENT, **HYBRID})


def config_values(file: GgufFile) -> ConfigJson:
    """The content of the config.json of this model. UnsupportedError and ConfigError name the key."""
    metadata = Metadata(file.path, file.metadata, file.tensors)
    values = architecture_of(file).fields(metadata, file)
    metadata.check_all_read()
    return values


def architecture_of(file: GgufFile) -> Architecture:
    """UnsupportedError where it is not read."""
    name = Metadata(file.path, file.metadata, file.tensors).architecture
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: 'general.architecture' is {name!r}; of GGUF files {', '.join(ARCHITECTURES)} are read."
        )
    return ARCHITECTURES[name]
