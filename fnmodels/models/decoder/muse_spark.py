"""Muse Spark's text (Meta, 2026, 816B-A42B): experts in half of the model's width, and gates of the residual stream.

Attention is that of the texts of Muse (`fnmodels.models.common.layers.muse`) with a scaleless norm of its result per
head. A layer with experts projects to their width, norms what they read and what each of them returns, and projects
back; the router reads the full width. Both sublayers are normed after themselves and join the stream x by a gate g per
element: with b = sigmoid(g / temperature), x becomes sqrt((1 - b)(1 + b)) x + b times their output.

The published files are those of a model with images and sound, of which the text is read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import muse
from fnmodels.models.common.layers.muse import embed, unembed  # noqa: F401
from fnmodels.models.common.spec import Leaf, Normal, decoder_leaves, gated_mlp_leaves, moe_leaves, norm, weight
from fnmodels.models.common.storage import Stored
from fnmodels.ops import gated_mlp
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.linear import linear
from fnmodels.ops.moe.each_output import with_each_output
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm, rms_norm_offset, rms_norm_scaled_input
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("muse_spark_text",)
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=tuple(kind + moe for moe in ("_moe", "") for kind in ("sliding", "full_nope", "full", "sliding_nope")),
    routed=True,
    router=ROUTER,
)
_DEFAULTS: dict[str, Any] = {"vocab_size": 202048, "hidden_size": 8192, "intermediate_size": 16384}
_DEFAULTS |= {"num_hidden_layers": 62, "num_attention_heads": 128}
_SCALES = {"query_scale": 5.4730064863875, "logit_scale": 0.1767766952966369}
_EXPERTS = {"num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 4096, "moe_hidden_size": 4096}
_NORMS = tuple(name for name in muse.NORMS if name != "post_attention_layernorm")  # which has no weight
_GATES = ("post_attention_residual_gate", "post_feedforward_residual_gate")
_NAMES = {"router": "gate.weight", "selection_bias": "gate.e_score_correction_bias"}
_NAMES |= {"expert_scale": "experts.post_expert_norm.weight"}


@dataclass(frozen=True, kw_only=True)
class Config(muse.MuseConfig):
    """Sizes and switches. moe_hidden_size: the width of what experts read and return."""

    num_local_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_hidden_size: int
    routed_scaling_factor: float = 1.0
    residual_temperature: float = 0.3
    query_scale: float = _SCALES["query_scale"]
    logit_scale: float = _SCALES["logit_scale"]  # of the router's logits too
    max_position_embeddings: int = 1048576

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)
        decoder.check_sizes(self, "moe_intermediate_size", "moe_hidden_size")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(_DEFAULTS | {name: value for name, value in values.items() if value is not None})
        where: dict[str, Any] = {"max_positions": 1048576, "head_dim": 64, "kv_heads": 16}
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=5e5, **where)
        own = muse.fields_from_hf(fields, usual, **_SCALES)
        layers, heads = usual["num_hidden_layers"], usual["num_attention_heads"]
        if usual["hidden_size"] % heads:
            raise ConfigError(
                f"{fields.where}: 'hidden_size' {usual['hidden_size']} is not a multiple of 'num_attention_heads' "
                f"{heads}, as it is in this family."
            )
        dense = decoder.sliding_layers(fields, [False] * layers, "dense", "sparse", name="mlp_layer_types")
        attends = zip(own.pop("layer_kinds"), dense, strict=True)
        fields.integer("num_local_experts", 256, high=mixture.experts_limit(layers))
        config = Config(
            **own,
            **fields.plain(**_EXPERTS, routed_scaling_factor=1.0),
            residual_temperature=fields.number("residual_gate_temperature", 0.3),
            layer_kinds=tuple(kind + "_moe" * (not plain) for kind, plain in attends),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = muse.fields_to_hf(self) | {"residual_gate_temperature": self.residual_temperature}
        own["mlp_layer_types"] = mixture.mlp_types(parsed(self.layer_kinds))
        names = (*muse.SAVED, *_EXPERTS, "routed_scaling_factor", "hidden_act")
        return decoder.decoder_to_hf(self, "MuseSparkForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them, but for the last."""
    D, std = config.hidden_size, config.initializer_range
    gate = Leaf((D,), torch.float32, ("embed",), Normal(std), decay=False, keep_dtype=True)
    around: Tree = {name: norm(D, "embed", 0.0) for name in _NORMS} | dict.fromkeys(_GATES, gate)
    around |= {"attention": muse.attention_leaves(config)}
    dense, routed = gated_mlp_leaves(D, config.intermediate_size, std=std), _moe_leaves(config)
    return decoder_leaves(
        config, [around | {"mlp": routed if kind.routed else dense} for kind in parsed(config.layer_kinds)]
    )


def _moe_leaves(config: Config) -> Tree:
    D, pooled, std = config.hidden_size, config.moe_hidden_size, config.initializer_range
    experts, inner = config.num_local_experts, config.moe_intermediate_size
    leaves = moe_leaves(D, experts, inner, std=std, selection_bias=True, wide_router=True)
    read = weight((experts, inner, pooled), ("expert", "expert_mlp", "moe_latent"), std)
    down = weight((experts, pooled, inner), ("expert", "moe_latent", "expert_mlp"), std)
    return leaves | {
        "experts": {"gate_proj": read, "up_proj": read, "down_proj": down},
        "pre_expert_proj": weight((pooled, D), ("moe_latent", "embed"), std),
        "pre_expert_norm": norm(pooled, "moe_latent", 0.0),
        "expert_scale": norm(pooled, "moe_latent", 0.0),  # of the norm of what each expert returns
        "post_expert_proj": weight((D, pooled), ("embed", "moe_latent"), std),
    }


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with all experts of a layer in two tensors."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        where, _, leaf = path.rpartition(".")
        if leaf in _GATES:
            names[path] = f"model.{path}.gate"
        elif where.endswith(".mlp") and leaf in _NAMES:
            names[path] = f"model.{where}.{_NAMES[leaf]}"
        elif where.endswith(".experts"):
            names |= mixture.stacked_experts(where, config.moe_intermediate_size)
        else:
            names[path] = decoder.decoder_name(path)
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, after = config.rms_norm_eps, config.post_norm_eps
    normed = rms_norm_offset(x, layer["input_layernorm"], eps=eps)
    mixed = rms_norm(muse.attend(layer["attention"], normed, mask, freqs, config, ctx, normed=True), None, eps=after)
    x = ctx.tap("middle", _joined(x, ctx.tap("attention", mixed), layer[_GATES[0]], config))
    normed, mlp = rms_norm_offset(x, layer["pre_feedforward_layernorm"], eps=eps), layer["mlp"]
    if LayerKind.parse(kind).routed:
        fed = _experts(mlp, normed, config, ctx)
    else:
        fed = gated_mlp(mlp, normed, activation=config.hidden_act, tap=ctx.tap)
    fed = rms_norm_scaled_input(fed, layer["post_feedforward_layernorm"], eps=after)
    return _joined(x, ctx.tap("mlp", fed), layer[_GATES[1]], config)


def _experts(mlp: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    """The experts' output [B, S, D] for the normed x; the router's logits are scaled as those of the model."""
    pooled = linear(x, mlp["pre_expert_proj"])
    pooled = rms_norm_offset(pooled, mlp["pre_expert_norm"], eps=config.rms_norm_eps)
    choice: dict[str, Any] = {"k": config.num_experts_per_tok, "bias": mlp["selection_bias"], "renormalize": True}
    route = functools.partial(sigmoid_top_k, **choice, norm_eps=1e-15, scale=config.routed_scaling_factor)

    def finish(y: Tensor) -> Tensor:
        return rms_norm_scaled_input(y, mlp["expert_scale"], eps=config.post_norm_eps)

    routed = {name: mlp[name] for name in ("router", "experts")}
    read = upcast(x) * config.logit_scale
    around = functools.partial(with_each_output, finish=finish)
    y = ctx.moe(routed, (read, pooled), route, act=config.hidden_act, dtypes=ROUTER, around=around)
    return linear(y, mlp["post_expert_proj"])


def _joined(x: Tensor, added: Tensor, gate: Tensor, config: Config) -> Tensor:
    """The stream after a sublayer, by the gate [D]: the square of x's share is at least 1e-3."""
    scaled = upcast(gate) / config.residual_temperature
    share = torch.sigmoid(scaled)
    kept = (torch.sigmoid(-scaled) * (1 + share)).clamp(min=1e-3).sqrt()
    return (kept * x + share * added).to(x.dtype)


PRESETS: dict[str, ConfigJson] = {
    "muse-spark-open": {"model_type": "muse_spark_text", **_DEFAULTS, "num_key_value_heads": 16, **_EXPERTS}
}
