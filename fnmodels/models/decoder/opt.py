"""OPT (Meta; arXiv 2205.01068), also of Galactica (arXiv 2211.09085), XGLM (arXiv 2112.10668), BioGPT (2210.10341).

Learned positions, of which a document's first token reads row 2, LayerNorms and an MLP without a gate. OPT 350M has its
norms after the sublayers and none at the end, and embeddings narrower than the layers. XGLM and BioGPT scale the
embeddings; XGLM adds sines and cosines of positions that begin with 2.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import no_freqs as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    decoder_leaves,
    embedding,
    layer_leaves,
    plain_mlp_leaves,
    usual_attention,
    weight,
)
from fnmodels.ops import layer_norm
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import sinusoids
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("opt", "xglm", "biogpt")
TRAITS = Traits(
    kinds=("full_nope",),
    dropout={"attention_dropout": ("weights",), "dropout": ("attention", "mlp")},
    dropout_defaults={"dropout": 0.1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    dropout_of={
        "xglm": {"attention_dropout": ("weights",), "dropout": ("attention", "mlp", "embedding")},
        "biogpt": {
            "attention_probs_dropout_prob": ("weights",),
            "hidden_dropout_prob": ("attention", "mlp", "embedding"),
        },
    },
)
_OPT = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act", "init_std": "initializer_range"}
_XGLM = _OPT | {"d_model": "hidden_size", "num_layers": "num_hidden_layers", "attention_heads": "num_attention_heads"}
_NAMES: dict[str, dict[str, str]] = {"opt": _OPT, "xglm": _XGLM, "biogpt": {}}
_ARCHITECTURES = {"opt": "OPTForCausalLM", "xglm": "XGLMForCausalLM", "biogpt": "BioGptForCausalLM"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {"positions": 2048, "activation": "relu", "inner": lambda hidden: 3072},
    "xglm": {"positions": 2048, "activation": "gelu", "inner": lambda hidden: 4096},
    "biogpt": {"positions": 1024, "activation": "gelu", "inner": lambda hidden: 4096},
}
_FIRST = 2  # the row of the first position
_ON_DISK = {
    ".o_proj.": ".out_proj.",
    ".input_layernorm.": ".self_attn_layer_norm.",
    ".post_attention_layernorm.": ".final_layer_norm.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
# The beginning of names and the final norm, where they differ.
_BASES = {"opt": "model.decoder.", "xglm": "model.", "biogpt": "biogpt."}
_LAST_NORMS = {"opt": "final_layer_norm.", "xglm": "layer_norm.", "biogpt": "layer_norm."}


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches. embedding_size: the width of the embedding and of the head; 0: that of the layers."""

    tie_word_embeddings: bool = True
    hidden_act: str = "relu"
    max_position_embeddings: int = 2048
    embedding_size: int = 0
    norm_first: bool = True
    last_norm: bool = True
    biases: bool = True
    norm_weights: bool = True
    scale_embedding: bool = False
    sinusoids: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.embedding_size:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        if self.last_norm and not self.norm_first:
            raise ConfigError("last_norm is for a model with norms before the sublayers.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        kin = str(values.get("model_type"))
        values = {"attention_dropout": 0.1, **values} if kin == "xglm" else values
        names, defaults = _NAMES.get(kin, {}), _DEFAULTS.get(kin, _DEFAULTS["opt"])
        fields, usual = older.older_fields(values, MODEL_TYPES, names, tied=True, **defaults)
        if usual["model_type"] != "opt":
            fields.take("layer_norm_eps", None)  # BioGPT's, which nothing reads
            scaled = fields.boolean("scale_embedding", True)
            own = usual | {"layer_norm_eps": 1e-5, "scale_embedding": scaled, "sinusoids": kin == "xglm"}
            return decoder.finished(Config(**own), fields)
        first = fields.boolean("do_layer_norm_before", True)
        config = Config(
            **usual,
            embedding_size=fields.integer("word_embed_proj_dim", usual["hidden_size"]),
            norm_first=first,
            last_norm=first and not fields.boolean("_remove_final_layer_norm", False),
            biases=fields.boolean("enable_bias", True),
            norm_weights=fields.boolean("layer_norm_elementwise_affine", True),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        names, name = _NAMES[self.model_type], _ARCHITECTURES[self.model_type]
        if self.model_type != "opt":
            own: ConfigJson = {"scale_embedding": self.scale_embedding, "layer_norm_eps": None}
            return older.older_to_hf(self, name, names, **own)
        own = {"do_layer_norm_before": self.norm_first, "word_embed_proj_dim": self.embedding_size}
        own |= {"_remove_final_layer_norm": self.norm_first and not self.last_norm}
        own |= {"enable_bias": self.biases, "layer_norm_elementwise_affine": self.norm_weights, "layer_norm_eps": None}
        return older.older_to_hf(self, name, names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, E, std = config.hidden_size, config.embedding_size, config.initializer_range
    attention = usual_attention(config, qkv_bias=config.biases, o_bias=config.biases)
    mlp = plain_mlp_leaves(D, config.intermediate_size, std=std, biases=config.biases)
    layer = layer_leaves(D, attention, mlp, norm_bias=True)
    tree = decoder_leaves(config, [_with_norms(layer, config.norm_weights) for _ in config.layer_kinds], norm_bias=True)
    tree = _with_norms(tree, config.last_norm and config.norm_weights)
    tree = tree if config.sinusoids else {"embed_positions": older.position_table(config, _FIRST)} | tree
    if E == D:
        return tree
    tree["embed_tokens"] = embedding(config.vocab_size, E, std, size_axis="narrow_embed")
    if "lm_head" in tree:
        tree["lm_head"] = weight((config.vocab_size, E), ("vocab", "narrow_embed"), std)
    if "score" in tree:
        tree["score"] = weight((config.num_labels, E), ("label", "narrow_embed"), std)
    between = {"project_in": weight((D, E), ("embed", "narrow_embed"), std)}
    return tree | between | {"project_out": weight((E, D), ("narrow_embed", "embed"), std)}


def _with_norms(leaves: Tree, kept: bool) -> Tree:
    """The leaves, without those of LayerNorms unless they are kept."""
    return leaves if kept else {name: leaf for name, leaf in leaves.items() if "norm" not in name}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    base, last = _BASES[config.model_type], _LAST_NORMS[config.model_type]
    names = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    names = {path: n.replace("model.norm.", f"model.{last}").replace("model.", base, 1) for path, n in names.items()}
    if config.model_type == "biogpt" and "lm_head" in names:
        names["lm_head"] = "output_projection.weight"
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs, 1) for path, name in names.items()}
    return names


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token or given embeddings in the layers' width, plus learned positions."""
    x = embed_tokens(params["embed_tokens"], inputs)
    x = linear(x, params["project_in"]) if "project_in" in params and x.shape[-1] == config.embedding_size else x
    if config.scale_embedding:
        tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
        x = x if tokens.is_floating_point() else x * config.hidden_size**0.5
    if config.sinusoids:
        return x + sinusoids(older.positions_of(inputs) + _FIRST, config.hidden_size).to(x.dtype)
    return older.placed(params, inputs, x, first=_FIRST)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    scale = config.head_dim**-0.5
    run = older.layer_norm_layer if config.norm_first else older.post_norm_layer
    return run(layer, x, mask, ctx, config=config, scale=scale)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm where there is one, and head: logits [B, S, V]."""
    if config.last_norm:
        x = layer_norm(x, params.get("norm"), params.get("norm_bias"), eps=config.layer_norm_eps)
    return decoder.project(params, linear(x, params["project_out"]) if "project_out" in params else x, config)


_SIZES = ("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
PRESETS = {
    name: {"model_type": "opt", "vocab_size": 50272, **dict(zip(_SIZES, sizes, strict=True)), **rest}
    for name, *sizes, rest in (
        ("opt-125m", 768, 3072, 12, 12, {}),
        ("opt-350m", 1024, 4096, 24, 16, {"do_layer_norm_before": False, "word_embed_proj_dim": 512}),
        ("opt-1.3b", 2048, 8192, 24, 32, {}),
        ("opt-2.7b", 2560, 10240, 32, 32, {}),
        ("opt-6.7b", 4096, 16384, 32, 32, {}),
        ("opt-13b", 5120, 20480, 40, 40, {}),
        ("opt-30b", 7168, 28672, 48, 56, {}),
        ("opt-66b", 9216, 36864, 64, 72, {}),
    )
}
_XGLM_SIZES = ("d_model", "ffn_dim", "num_layers", "attention_heads")
PRESETS |= {
    name: {"model_type": "xglm", "vocab_size": 256008, **dict(zip(_XGLM_SIZES, sizes, strict=True))}
    for name, *sizes in (
        ("xglm-564m", 1024, 4096, 24, 16),
        ("xglm-1.7b", 2048, 8192, 24, 16),
        ("xglm-2.9b", 2048, 8192, 48, 16),
        ("xglm-7.5b", 4096, 16384, 32, 32),
    )
}
PRESETS["biogpt"] = {"model_type": "biogpt", "vocab_size": 42384, "hidden_size": 1024, "intermediate_size": 4096}
PRESETS["biogpt"] |= {"num_hidden_layers": 24, "num_attention_heads": 16}
