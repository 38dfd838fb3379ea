"""An architecture of GGUF files as data: the fields of its config.json, and the names of its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .blocks import dequantized
from .header import GgufFile
from .metadata import Metadata, decoder_fields, pooling
from .rotary_factors import LONG_FACTORS, ROPE_FACTORS, llama3_scaling

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
Fields = Callable[[Metadata, GgufFile], ConfigJson]
Change = Callable[[Sequence[Tensor]], Tensor]


class To(NamedTuple):
    """A tensor in Hugging Face's files that a file's tensors become by `change`, in the order of the table."""

    name: str
    change: Change


Names = Mapping[str, "str | To"]


def no_names(values: Mapping[str, Any]) -> Names:
    """Names beside the table: none where names do not depend on sizes."""
    return {}


def no_fields(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Fields beside the table: none where all fields stand in it."""
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        constants: fields of config.json that the architecture implies; model_type among them.
        layer: {name of a module of a layer, or of a tensor of it: its name in Hugging Face's files}, with {} for the
            number of an expert.
        counts: {field: key of the metadata} of whole numbers.
        numbers: {field: key} of other numbers.
        flags: {field: tensor of the first layer that has it} of switches.
        more: the fields that need code, which are read before all others.
        epsilon: the field of the epsilon of norms that subtract the mean, None for RMS norms.
        without: fields of all decoders that config.json has not. A key of one that would change the maths is refused,
            unless `more` reads it.
        with_head_dim: whether the default of head_dim in config.json is another than a quotient.
        interleaved: whether rows of q and k are in the order of rotations of neighbours (llama.cpp's older form).
        norm_offset: what the file adds to the weights of norms, which multiply by 1 + weight.
        sized: more names, of a layer or outside of layers, that need the fields of config.json.
        top: names of modules outside of layers.
        root: of the names of layers.
        base: the fields that models of its kind share, of the metadata and the key of the epsilon of norms.
    """

    constants: Mapping[str, Any]
    layer: Names = field(default_factory=lambda: LAYER)
    counts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    more: Fields = no_fields
    epsilon: str | None = None
    without: tuple[str, ...] = ()
    with_head_dim: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    sized: Callable[[Mapping[str, Any]], Names] = no_names
    top: Names = field(default_factory=lambda: TOP)
    root: str = "model.layers"
    base: Callable[[Metadata, str], ConfigJson] = decoder_fields

    def fields(self, metadata: Metadata, file: GgufFile) -> ConfigJson:
        """The content of config.json. ConfigError and UnsupportedError name a key."""
        more = self.more(metadata, file)
        more |= {name: metadata.count(key) for name, key in self.counts.items()}
        more |= {name: metadata.number(key) for name, key in self.numbers.items()}
        more |= {name: f"blk.0.{tensor}" in file.tensors for name, tensor in self.flags.items()}
        key = "attention.layer_norm_rms_epsilon" if self.epsilon is None else "attention.layer_norm_epsilon"
        pooling(metadata)  # which is checked, and no field
        groups_read = metadata.has_read("attention.head_count_kv")
        base = self.base(metadata, key)
        self._check_left_out(metadata, base, more, groups_read)
        if self.epsilon is not None:
            base[self.epsilon] = base.pop("rms_norm_eps")
            metadata.take("attention.layer_norm_rms_epsilon")  # which llama.cpp does not read for these norms
        if self.with_head_dim:
            base |= {"head_dim": metadata.head_dim}
        factors = {} if "rope_parameters" in more else _factors(file, base, metadata)
        values = base | factors | dict(self.constants) | more
        return {name: value for name, value in values.items() if name not in self.without}

    def _check_left_out(self, metadata: Metadata, base: ConfigJson, more: ConfigJson, groups_read: bool) -> None:
        """UnsupportedError for a value of a field that config.json has not, which nothing of `more` follows."""
        prefix = f"{metadata.path}: '{metadata.architecture}"
        scaling = base.get("rope_scaling", {}) if "rope_scaling" in self.without else {}
        kind, is_one = scaling.get("rope_type"), scaling.get("factor") == 1.0
        followed = more.get("rope_parameters", {}).get("rope_type") == kind
        if kind is not None and not followed and not (kind == "linear" and is_one):
            raise UnsupportedError(
                f"{prefix}.rope.scaling.type' is {kind!r}; files of this architecture are read without scaled "
                "rotary embeddings."
            )
        if "num_key_value_heads" not in self.without or groups_read:
            return
        if (groups := base["num_key_value_heads"]) != (heads := base["num_attention_heads"]):
            raise UnsupportedError(
                f"{prefix}.attention.head_count_kv' is {groups}; files of this architecture are read with as many as "
                f"'attention.head_count', {heads}."
            )


def _factors(file: GgufFile, fields: ConfigJson, metadata: Metadata) -> ConfigJson:
    """{"rope_scaling": the rule} of a file that divides frequencies by its factors: Llama 3's, or those of longrope."""
    declared: ConfigJson = fields.get("rope_scaling", {})
    if declared.get("rope_type") == "longrope":
        if not (lists := long_factors(file)):
            raise UnsupportedError(
                f"{file.path}: '{metadata.architecture}.rope.scaling.type' is 'longrope', and the file has no tensors "
                f"{' and '.join(map(repr, LONG_FACTORS.values()))}, which it needs."
            )
        return {"rope_scaling": declared | lists}
    if ROPE_FACTORS not in file.tensors:
        return {}
    scaling = llama3_scaling(tensor_of(file, ROPE_FACTORS), fields["rope_theta"], metadata.head_dim)
    if scaling is None:
        raise UnsupportedError(
            f"{file.path}: the tensor {ROPE_FACTORS!r} divides the frequencies by other factors than Llama 3's rule."
        )
    return {"rope_scaling": scaling}


def long_factors(file: GgufFile) -> ConfigJson:
    """The lists of factors of a longrope, {} of a file without any. UnsupportedError for one of both."""
    factors = {name: tensor for name, tensor in LONG_FACTORS.items() if tensor in file.tensors}
    if len(factors) == 1:
        (there,) = factors.values()
        (absent,) = set(LONG_FACTORS.values()) - {there}
        raise UnsupportedError(f"{file.path}: the tensor {there!r} is there without {absent!r}.")
    # A float32 in its shortest decimal form, as config.json has it.
    return {name: [float(str(one)) for one in tensor_of(file, tensor).numpy()] for name, tensor in factors.items()}


def tensor_of(file: GgufFile, name: str) -> Tensor:
    """A tensor of the file in fp32."""
    return dequantized(file.read(name), file.tensors[name].kind, file.tensors[name].shape)


def rows(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of matrices, one matrix after the other, of each expert where there are some."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -2)
