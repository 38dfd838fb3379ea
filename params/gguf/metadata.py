"""Metadata of a GGUF file as the content of a config.json. Every key of the architecture is read or refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .header import GgufTensor

# what changes nothing: how the file was made, and settings of llama.cpp for what the tensors show
_ROTATED = "rope.dimension_count"
_VALUES = "attention.value_length"
_NEUTRAL = ("rope.scaling.finetuned", "tensor_data_layout")
_ZERO = (
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
    *(
        "expert_weights_scale",
        "expert_gating_func",
        "leading_dense_block_count",
        "nextn_predict_layers",
    ),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
    *("attention.temperature_length", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"),
    *("attention.sliding_window", "attention.shared_kv_layers", "attn_logit_softcapping", "final_logit_softcapping"),
    *("router_logit_softcapping", "logit_scale", "embedding_scale", "residual_scale", "rescale_every_n_layers"),
)
# What llama.cpp assumes where a file has no such key: a key with this value says nothing, whoever reads it.
_ABSENT: Mapping[str, float | bool] = {
    **dict.fromkeys(_ZERO, 0),
    **dict.fromkeys(("expert_weights_norm", "swin_norm", "use_parallel_residual"), False),
    "attention.causal": True,
}


_POOLINGS = ("mean", "first", "last")  # of 'pooling_type' from 1, by the names of fnmodels.pool
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}


class Metadata:
    """The keys of one architecture, `llama.block_count` by the name `block_count`; knows which have been read."""

    def __init__(self, path: Path, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.path, self.tensors = path, tensors
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise ConfigError(f"{path}: 'general.architecture' is {architecture!r}, but must name an architecture.")
        self.architecture = architecture
        prefix = f"{architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        self._read = set(_NEUTRAL)

    def take(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Sets what later readers find under a key, which has been read."""
        self._values[name] = value

    def has_read(self, name: str) -> bool:
        return name in self._read

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number from 1; a list of equal ones, one for each layer, counts as one."""
        value = self.take(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"{self._key(name)} differs from layer to layer, which is not read.")
            value = value[0]
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self._key(name)} is {value!r}, but must be a whole number from 1.")
        return value

    def count(self, name: str) -> int:
        """A whole number from 0, which is that of a file without the key."""
        return 0 if self.take(name, 0) == 0 else self.integer(name)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        heads, hidden = self.integer("attention.head_count"), self.integer("embedding_length")
        return self.integer("attention.key_length", max(hidden // heads, 1))

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.integer("block_count")

    def switch(self, name: str) -> bool:
        """A truth value; that of a file without the key is false."""
        value = self.take(name, False)
        if type(value) is not bool:
            raise ConfigError(f"{self._key(name)} is {value!r}, but must be true or false.")
        return value

    def each_layer(self, name: str) -> list[Any]:
        """A value for each layer, of which a list has one each."""
        value = self.take(name)
        values = value if isinstance(value, list) else [value] * self.layers
        if any(type(one) not in (int, float, bool) for one in values):
            found = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{self._key(name)} {found}, but must be a number or a switch for each layer.")
        if len(values) < self.layers:
            raise ConfigError(f"{self._key(name)} has {len(values)} values for {self.layers} layers.")
        return values[: self.layers]

    def expect(self, name: str, value: Any) -> None:
        """UnsupportedError where a key has another value than all files of this architecture that are known."""
        if (other := self.take(name, value)) != value:
            raise UnsupportedError(f"{self._key(name)} is {other!r}; only {value!r} is read.")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{self._key(name)} is {value!r}, but must be a number.")
        return float(value)

    def check_all_read(self) -> None:
        """UnsupportedError for keys that nothing has read, unless a file without them says the same."""
        unread = sorted(name for name, value in self._values.items() if name not in self._read and _says(name, value))
        if unread:
            keys = ", ".join(f"'{self.architecture}.{name}'" for name in unread)
            raise UnsupportedError(f"{self.path}: the metadata has {keys}, which may change the model and is not read.")

    def _key(self, name: str) -> str:
        return f"{self.path}: '{self.architecture}.{name}'"


def _says(name: str, value: Any) -> bool:
    """Whether a key with this value says more than a file without it; false is no number."""
    absent = _ABSENT.get(name)
    is_absent = absent is not None and isinstance(value, bool) == isinstance(absent, bool) and value == absent
    return not is_absent


def decoder_fields(metadata: Metadata, epsilon: str = "attention.layer_norm_rms_epsilon") -> ConfigJson:
    """The fields of a config.json that all decoders here share. epsilon: the key of that of norms."""
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.head_dim
    for name in (_VALUES, _ROTATED):
        if metadata.has_read(name):
            continue
        if (other := metadata.integer(name, head_dim)) != head_dim:
            raise UnsupportedError(
                f"{metadata.path}: '{metadata.architecture}.{name}' is {other}, where heads have {head_dim} channels; "
                "only equal ones are read."
            )
    fields = {
        **vocabulary(metadata),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number(epsilon),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
    }
    return fields | ({"head_dim": head_dim} if head_dim * heads != hidden else {}) | rope_scaling(metadata)


def rms_epsilon(metadata: Metadata) -> None:
    """Reads the epsilon of RMS norms under the key of layer norms, as config.json calls it and newer files repeat."""
    epsilon = metadata.take("attention.layer_norm_epsilon")
    if metadata.take("attention.layer_norm_rms_epsilon") is None:
        metadata.put("attention.layer_norm_rms_epsilon", epsilon)


def rows_of(metadata: Metadata, tensor: str) -> int:
    """The rows of a tensor, which give a size that no key has. ConfigError where the file has none of this name."""
    if tensor not in metadata.tensors:
        raise ConfigError(f"{metadata.path} has no tensor {tensor!r}, whose rows give a size of the model.")
    return metadata.tensors[tensor].shape[0]


def pooling(metadata: Metadata) -> str | None:
    """How hidden states become one vector of a text; None of a file that does not say. It changes no hidden state."""
    kind = metadata.count("pooling_type")
    if kind > len(_POOLINGS):
        raise UnsupportedError(
            f"{metadata.path}: '{metadata.architecture}.pooling_type' is {kind}; read are 0 (none) to 3 (last)."
        )
    return _POOLINGS[kind - 1] if kind else None


def vocabulary(metadata: Metadata) -> ConfigJson:
    """The number of tokens, and whether the head has a matrix of its own."""
    rows = rows_of(metadata, "token_embd.weight")
    if (count := metadata.integer("vocab_size", rows)) != rows:
        raise ConfigError(
            f"{metadata.path}: '{metadata.architecture}.vocab_size' is {count}, "
            f"and 'token_embd.weight' has {rows} rows."
        )
    return {"vocab_size": rows, "tie_word_embeddings": "output.weight" not in metadata.tensors}


def rope_scaling(metadata: Metadata) -> ConfigJson:
    """{"rope_scaling": its fields}, or {} for plain rotary embeddings."""
    kind = metadata.take("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind == "longrope":  # llama.cpp divides by this factor too, and multiplies by 1 where a file has no other number
        metadata.expect("rope.scaling.factor", 1.0)
        original = metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))
        scale = metadata.number("rope.scaling.attn_factor", 1.0)
        return {
            "rope_scaling": {
                "rope_type": kind,
                "original_max_position_embeddings": original,
                "attention_factor": scale,
            }
        }
    values: ConfigJson = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        values["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
        named = {name: metadata.take(f"rope.scaling.{key}") for name, key in _YARN.items()}
        values |= {name: value for name, value in named.items() if value is not None}
        if multiplier := metadata.take("rope.scaling.yarn_log_multiplier", 0.0):
            # a tenth of both, which are equal in all that was published
            values |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    elif kind != "linear":
        raise UnsupportedError(
            f"{metadata.path}: '{metadata.architecture}.rope.scaling.type' is {kind!r}; "
            "none, linear, yarn and longrope are read."
        )
    return {"rope_scaling": values}


def scaled_rope(metadata: Metadata) -> ConfigJson:
    """The fields `rope_parameters` of one kind of rotary embeddings, with the scaling of the file."""
    plain = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    return plain | rope_scaling(metadata).get("rope_scaling", {})
