"""Llama 4 Scout and Maverick, their text part (Meta, 2025).

Three of four layers rotate and see the chunk of positions that they are in; every fourth one has no rotary embedding
and sees everything, with queries that grow with the logarithm of their position (arXiv 2501.19399). After the rotation
queries and keys may be normalized, without a weight. Experts, in every layer or every second one, get their token times
the router's sigmoid, beside one expert that all tokens pass through. A llama4 checkpoint's vision tower is left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Chunk
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, layer_leaves, moe_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp, glu
from fnmodels.ops.moe.experts import Experts
from fnmodels.ops.moe.layer import KEPT, MOE_TAPS, moe
from fnmodels.ops.moe.router import RouterDtypes, top_k_sigmoid
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary_interleaved, no_rotation, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("llama4", "llama4_text")
KINDS = tuple(see + nope + moe for see in ("chunked", "full") for nope in ("", "_nope") for moe in ("_moe", ""))
ROUTED = True
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
LEFTOVERS = (r"vision_model\..*", r"multi_modal_projector\..*")
TAPS = ("attention", "middle", "mlp", *MOE_TAPS)
# the tower's own, and the tokens in whose place images are put
_VISION = ("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names one of KINDS per layer; left empty, every layer is "chunked_moe".

    "chunked" layers see their chunk, "full" ones everything; "_nope": nothing rotates; "_moe": with experts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, and of the shared one
    intermediate_size_mlp: int  # of layers without experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_local_experts: int
    num_experts_per_tok: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope(500000.0)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_qk_norm: bool = True
    # queries without rotation are multiplied by 1 + attn_scale ln(1 + floor((position + 1) / floor_scale))
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: int = 8192
    attention_chunk_size: int = 8192
    hidden_act: str = "silu"
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="llama4_text", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        decoder.check_decoder(self, KINDS)
        mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        Of model type llama4 the text part is read: `text_config`, with a vision tower's beside it.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "llama4":
            fields = decoder.text_part(fields, "llama4_text", ignored=_VISION)
        sizes = decoder.decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=8, head_dim=128)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        experts, chosen = mixture.experts_from_hf(fields, 16, 1, sizes["num_hidden_layers"])
        fields.expect("router_jitter_noise", 0.0, 0)
        fields.expect("for_llm_compressor", False)
        fields.expect("attn_temperature_tuning", True, False, 4)  # the first files have 4, as a yes
        config = Config(
            **sizes,
            intermediate_size_mlp=fields.integer("intermediate_size_mlp", 16384),
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            rope=rope_from_hf(fields, theta=500000.0, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            use_qk_norm=fields.boolean("use_qk_norm", True),
            attn_temperature_tuning=bool(fields.take("attn_temperature_tuning", True)),
            attn_scale=fields.number("attn_scale", 0.1),
            floor_scale=fields.integer("floor_scale", 8192),
            attention_chunk_size=fields.integer("attention_chunk_size", 8192),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=_layer_kinds(fields, sizes["num_hidden_layers"]),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect, of model type llama4 with nothing but `text_config`."""
        names = ["intermediate_size_mlp", "rms_norm_eps", "attention_bias", "use_qk_norm", "attn_temperature_tuning"]
        names += ["attn_scale", "floor_scale", "attention_chunk_size", "hidden_act", "num_local_experts"]
        own = {name: getattr(self, name) for name in (*names, "num_experts_per_tok")}
        chunked = [kind.startswith("chunked") for kind in self.layer_kinds]
        own["layer_types"] = decoder.layer_types(chunked, near="chunked_attention")
        own["no_rope_layers"] = [int("nope" not in kind) for kind in self.layer_kinds]  # 1: it has one
        own["moe_layers"] = [i for i, kind in enumerate(self.layer_kinds) if kind.endswith("_moe")]
        text = replace(self, model_type="llama4_text")
        inner = decoder.decoder_to_hf(text, "Llama4ForCausalLM", rope_parameters=rope_to_hf(self.rope), **own)
        if self.model_type == "llama4_text":
            return inner
        outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
        return outer | {"text_config": inner, "tie_word_embeddings": self.tie_word_embeddings}


def _layer_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """What each layer sees, whether it rotates, whether it has experts: from lists, or from the rules behind them."""
    rotates = decoder.rotating_layers(fields, fields.take("no_rope_layers", None) or None, layers)  # [] is no list
    chunked = decoder.sliding_layers(fields, [bool(one) for one in rotates], near="chunked_attention")
    step = fields.integer("interleave_moe_layer_step", 1)
    named = fields.take("moe_layers", list(range(step - 1, layers, step)))
    sparse = mixture.numbers_of_layers(fields, "moe_layers", named, layers)
    return tuple(
        ("chunked" if near else "full") + ("" if rotate else "_nope") + ("_moe" if i in sparse else "")
        for i, (near, rotate) in enumerate(zip(chunked, rotates, strict=True))
    )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, on = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
    experts, inner = config.num_local_experts, config.intermediate_size

    def layer(kind: str) -> Tree:
        mlp: Tree = gated_mlp_leaves(D, config.intermediate_size_mlp, std=std)
        if kind.endswith("_moe"):
            mlp = moe_leaves(D, experts, inner, std=std, shared=inner)
        return layer_leaves(D, attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=on, o_bias=on), mlp)

    return decoder_leaves(config, [layer(kind) for kind in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its part of a tensor of all experts}."""
    D, inner = config.hidden_size, config.intermediate_size
    prefix = "language_model." if config.model_type == "llama4" else ""
    names: dict[str, Stored] = {
        path: prefix + decoder.decoder_name(path).replace(".mlp.", ".feed_forward.") for path in flatten(spec(config))
    }
    for i, kind in enumerate(config.layer_kinds):
        if kind.endswith("_moe"):
            ours, theirs = f"layers.{i}.mlp.experts", f"{prefix}model.layers.{i}.feed_forward.experts"
            names |= mixture.transposed_experts(ours, theirs, D, inner, in_turn=False)
    return names


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. Chunks are of positions, whatever stands to the left of a row."""
    chunks = Causal() & Chunk(config.attention_chunk_size)
    rules = {kind: chunks if kind.startswith("chunked") else Causal() for kind in config.layer_kinds}
    return masks_of(rules, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": fp32 [B, S, R/2, 2]}}, where nothing rotates with R = 0 and "temperature", fp32 [B, S]."""
    rotates = {"table": rotary_table(config.rope, config.head_dim, positions, length)}
    still = {"table": no_rotation(positions)}
    if config.attn_temperature_tuning:
        grown = torch.log1p(torch.floor((positions.double() + 1) / config.floor_scale))
        still["temperature"] = (1 + config.attn_scale * grown).float()
    return {kind: still if "nope" in kind else rotates for kind in sorted(set(config.layer_kinds))}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: dict[str, Tensor],
    /,
    *,
    config: Config,
    kind: str,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    taps: tuple[str, ...] = (),
    valid: Tensor | None = None,
    routing: Tensor | None = None,
    experts: str | Experts = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {counts, router_logits, tap: tensor}). valid, routing, experts: see
    `ops.moe.layer`.
    """
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = (apply_rotary_interleaved(t, freqs["table"]) for t in (q, k))
    if config.use_qk_norm and "nope" not in kind:
        q, k = rms_norm(q, None, eps=eps), rms_norm(k, None, eps=eps)
    if "temperature" in freqs:
        q = (q * freqs["temperature"][..., None, None]).to(q.dtype)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    named = {"attention": attended, "middle": middle}
    if not kind.endswith("_moe"):
        named["mlp"] = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
        return middle + named["mlp"], {name: named[name] for name in taps}
    route = functools.partial(top_k_sigmoid, k=config.num_experts_per_tok, dtype=ROUTER.output_dtype(x.dtype))
    given: Any = {"valid": valid, "routing": routing, "experts": experts, "kernel": kernel, "input_weighted": True}
    fed, routed = moe(layer["mlp"], normed, route, act=functools.partial(glu, activation=config.hidden_act), **given)
    return middle + fed, {name: (named | routed | {"mlp": fed})[name] for name in (*KEPT, *taps)}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
