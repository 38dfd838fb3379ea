"""Common parts of the Granite families: multipliers of embeddings, residual branches, attention scores and logits.

They come from maximal update parametrization (arXiv 2203.03466).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import parsed
from fnmodels.models.common.spec import Constant, Leaf
from fnmodels.models.common.storage import Stored, TensorSlice, fuse
from fnmodels.ops import Rope, apply_rotary, embed_tokens, project_out, project_qkv
from fnmodels.tree import Tree

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True)
class MultipliedConfig(decoder.BaseConfig):
    """The Config fields common to the Granite families."""

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of scores, instead of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # logits are divided by it


def granite_fields(fields: Fields, model_types: tuple[str, ...]) -> dict[str, Any]:
    """The fields of MultipliedConfig except layer_kinds and extra, from a config.json."""
    return decoder.base_fields(fields, model_types, max_positions=2048) | {
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_bias": fields.boolean("attention_bias", False),
        **{name: fields.number(name, 1.0) for name in MULTIPLIERS},
    }


def granite_to_hf(config: MultipliedConfig, architecture: str, *names: str, **rest: Any) -> ConfigJson:
    """A config.json in the current dialect; arguments as for `decoder.decoder_to_hf`."""
    own = ("rms_norm_eps", "attention_bias", "hidden_act", *MULTIPLIERS)
    return decoder.decoder_to_hf(config, architecture, *own, *names, **rest)


@dataclass(frozen=True)
class WindowedConfig(MultipliedConfig):
    """The Config fields of a Granite family some of whose members have sliding-window layers and sinks."""

    sinks: bool = False  # a logit per head, which competes with the keys
    sliding_window: int | None = None
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers


WINDOWED_KINDS = ("full", "sliding", "full_nope", "sliding_nope")


def windowed_fields(fields: Fields, usual: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    """The Config fields of a model with sinks, a window in some layers, and a theta per layer, 0 for no rotation.

    suffix: the end of the kinds of layers, such as "_moe". UnsupportedError for thetas that do not follow from which
    layers slide.
    """
    layers, rope = usual["num_hidden_layers"], usual["rope"]
    slides = decoder.sliding_layers(fields, [i % 4 != 0 for i in range(layers)])
    thetas = fields.take("layer_rope_theta", [rope.theta] * layers)
    by_type = decoder.by_window(fields, "layer_rope_theta", thetas, slides, rope.theta)  # 0: no rotation
    return {
        "sinks": True,
        "sliding_window": fields.integer("sliding_window", 128),
        "rope": replace(rope, theta=float(by_type[False] or rope.theta)),
        "local_rope": replace(rope, theta=float(by_type[True] or rope.theta)),
        "layer_kinds": tuple(("sliding" if s else "full") + ("" if by_type[s] else "_nope") + suffix for s in slides),
    }


def windowed_to_hf(config: WindowedConfig) -> dict[str, Any]:
    """The fields that `windowed_fields` reads back; none for a model without sinks."""
    if not config.sinks:
        return {}
    kinds, ropes = parsed(config.layer_kinds), {False: config.rope, True: config.local_rope}
    return {
        "sliding_window": config.sliding_window,
        "layer_types": decoder.layer_types([kind.slides for kind in kinds]),
        "layer_rope_theta": [ropes[kind.slides].theta if kind.rotates else 0 for kind in kinds],
    }


def sinks_leaves(config: WindowedConfig) -> dict[str, Leaf]:
    """The sinks of a layer's attention, if the model has them."""
    sinks = Leaf((config.num_attention_heads,), torch.float32, ("heads",), Constant(0.0), decay=False)
    return {"sinks": sinks} if config.sinks else {}


def embed(params: Tree, inputs: Tree, /, *, config: MultipliedConfig) -> Tensor:
    """x [B, S, D]: token or given embeddings times embedding_multiplier, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs) * config.embedding_multiplier


def attend(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: MultipliedConfig, ctx: Context) -> Tensor:
    """Attention of the normed x [B, S, D], with the output projection: [B, S, D]."""
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    sinks = weights.get("sinks")
    return project_out(weights, ctx.attend(q, k, v, mask, scale=config.attention_multiplier, sinks=sinks))


def unembed(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Final norm, output head and logits_scaling: logits [B, S, V]."""
    logits = decoder.unembed(params, x, config=config)
    return logits / config.logits_scaling if decoder.is_lm(config) else logits


# What transformers' modules have in place of the names on disk of `expert_names`.
IN_MEMORY = {
    r"\.block_sparse_moe\.input_linear\.weight$": ".block_sparse_moe.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight$": ".block_sparse_moe.experts.down_proj",
    r"\.router\.layer\.": ".router.",
}


def expert_names(layer: int, inner: int) -> dict[str, Stored]:
    """{path: name on disk} of a layer's router and experts of width `inner`, gate and up fused, all in one tensor."""
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
    names: dict[str, Stored] = {
        f"{ours}.experts.{leaf}_proj": TensorSlice(
            f"{theirs}.input_linear.weight", i * inner, (i + 1) * inner, 2 * inner, batched=True
        )
        for i, leaf in enumerate(("gate", "up"))
    }
    names[f"{ours}.experts.down_proj"] = f"{theirs}.output_linear.weight"
    return names | {f"{ours}.router": f"{theirs}.router.layer.weight"}


def shared_names(layer: int, mlp: str, width: int) -> dict[str, Stored]:
    """{path: name on disk} of a layer's dense MLP or shared expert, whose path is `mlp`, with gate and up fused."""
    there = f"model.layers.{layer}.shared_mlp"
    names: dict[str, Stored] = {f"{mlp}.down_proj": f"{there}.output_linear.weight"}
    return names | fuse(f"{there}.input_linear.weight", {f"{mlp}.{name}_proj": width for name in ("gate", "up")})
