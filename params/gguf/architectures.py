"""The architectures that are read, and the content of a config.json from a file of one."""

from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import Architecture
from .dense import DENSE
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .gemma import GEMMAS
from .header import GgufFile
from .hybrid import HYBRID
from .latent import LATENT
from .ling import LING
from .metadata import Metadata, pooling
from .older import OLDER
from .recurrent import RECURRENT
from .routed import ROUTED

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {**DENSE, **ROUTED, **LATENT, **HYBRID, **OLDER, **RECURRENT, **ENCODERS, **GEMMAS, **ENCODER_DECODERS, **LING}
)

# {architecture that is not read: the model type of its family here}
UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "apertus": "apertus",
        "bailingmoe": "bailing_moe",
        "bitnet": "bitnet",
        "chatglm": "glm",
        "cohere2moe": "cohere2_moe",
        "deci": "nemotron-nas",
        "deepseek32": "deepseek_v32",
        "deepseek4": "deepseek_v4",
        "dream": "Dream",
        "glm-dsa": "glm_moe_dsa",
        "gptj": "gptj",
        "jina-bert-v3": "jina_embeddings_v3",
        "kimi-linear": "kimi_linear",
        "llada": "llada",
        "mellum": "mellum",
        "mimo2": "mimo_v2_flash",
        "minicpm3": "minicpm3",
        "mistral4": "mistral4",
        "paddleocr": "paddleocr_vl",
        "rwkv7": "rwkv7",
        "step35": "step3p5",
    }
)


def config_values(file: GgufFile) -> ConfigJson:
    """The content of the config.json of this model. UnsupportedError and ConfigError name the key."""
    metadata = Metadata(file.path, file.metadata, file.tensors)
    values = architecture_of(file).fields(metadata, file)
    metadata.check_all_read()
    return values


def pooling_of(file: GgufFile) -> str | None:
    """How hidden states become one vector of a text, by its name in `fnmodels.pool`; None where the file has no word.

    UnsupportedError: a kind that is not read.
    """
    return pooling(Metadata(file.path, file.metadata, file.tensors))


def architecture_of(file: GgufFile) -> Architecture:
    """UnsupportedError where it is not read."""
    name = Metadata(file.path, file.metadata, file.tensors).architecture
    if name not in ARCHITECTURES:
        family = (
            f"this model is read as a Hugging Face folder (model type {UNREAD[name]!r}), but not as GGUF"
            if name in UNREAD
            else "no family of this library is known to have it"
        )
        raise UnsupportedError(
            f"{file.path}: 'general.architecture' is {name!r}; {family}. Of GGUF files {', '.join(ARCHITECTURES)} "
            "are read."
        )
    return ARCHITECTURES[name]
