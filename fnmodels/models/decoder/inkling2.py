"""Inkling 2 (Thinking Machines, 2026): attention over depth in place of one residual stream, and loops (Mini).

Each sublayer reads a mixture of the states that blocks of layers began with and of that of its own block
(`fnmodels.ops.streams.depth`); those of blocks travel from layer to layer beside x, by `Context.leave`. A convolution
over the last tokens follows each sublayer, and those of keys and values in full layers have taps that depend on the
token (`ops.recurrent.dynamic_conv`). Scores have a bias by distance and a sink of each query in place of a rotary
embedding. Queries and keys have a largest norm, and queries of full layers grow with the logarithm of their position.

In Inkling 2 Mini (inkling2_loop) a range of layers runs several times. Each pass begins with the states before the
range, and from the second on its sublayers read messages of the pass before, by attention over its blocks and a gate.
A pass of a layer is what a layer is elsewhere, see `family.stored_layers`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import build_segments, last_segment
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import short_conv
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.inkling2.fields import IGNORED, fields_from_hf, fields_to_hf
from fnmodels.models.common.inkling2.leaves import MESSAGES, layer_leaves
from fnmodels.models.common.inkling2.names import IN_MEMORY, hf_names, in_memory, in_memory_forms  # noqa: F401
from fnmodels.models.common.inkling2.passes import begun, kinds, left_shape  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, norm
from fnmodels.ops import Rope, no_rotation, project_out, rms_norm, split_heads, upcast
from fnmodels.ops.attention.relative_bias import DistanceBias
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import softcapped_swiglu
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import l2_clip, rms_norm_fp32_weight
from fnmodels.ops.recurrent.conv_reads import reads_of
from fnmodels.ops.recurrent.dynamic_conv import dynamic_conv, residual_conv
from fnmodels.ops.rotary import log_scale
from fnmodels.ops.streams.depth import attend_depth, gate_message
from fnmodels.tree import Tree

MODEL_TYPES = ("inkling2_text", "inkling2", "inkling2_loop_text", "inkling2_loop")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("sliding_moe", "full_moe"),
    routed=True,
    router=ROUTER,
    sinks=True,
    biased=True,
    unread={"vision": r"model\.visual\..*"},
    in_memory=IN_MEMORY,
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. num_hidden_layers and layer_kinds are of all passes of layers.

    vocab_size: rows of the head; embedding_rows: those of the embedding. relative_dim, relative_extent: the width of
    what a query says of distances, and the distances of full layers that have a bias. log_floor, log_alpha: see
    `log_scale`. loop_start, loop_end: the layers that run loop_passes times; equal: there is no loop.
    """

    # what the maths has no use for, or other fields say
    intermediate_size: int = field(init=False, compare=False)
    rope: Rope = field(default=Rope(), init=False, compare=False)
    tie_word_embeddings: bool = field(default=False, init=False, compare=False)
    hidden_act: str = field(default="silu", init=False, compare=False)
    embedding_rows: int
    rms_norm_eps: float = 1e-6
    sliding_window: int = 1024
    sliding_attention_heads: int
    sliding_key_value_heads: int
    sliding_head_dim: int
    relative_dim: int = 16
    relative_extent: int = 1024
    log_floor: int = 128000
    log_alpha: float = 0.1
    conv_kernel: int = 4
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float = 8.0
    qk_clip: float = 22.627416997969522
    relative_clip: float = 8.0
    layers_per_block: int = 6
    gate_softcap: float = 4.0
    up_softcap: float = 25.0
    final_softcap: float = 30.0
    loop_start: int = 0
    loop_end: int = 0
    loop_passes: int = 1
    loop_gate_rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
        decoder.check_sizes(self, "sliding_attention_heads", "sliding_key_value_heads", "sliding_head_dim")
        sizes = ("relative_dim", "relative_extent", "log_floor", "layers_per_block", "loop_passes")
        decoder.check_sizes(self, *sizes)
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        short_conv.check_kernel(self)
        start, end, n = self.loop_start, self.loop_end, self.layers_per_block
        heads, kv_heads = self.sliding_attention_heads, self.sliding_key_value_heads
        if heads % kv_heads:
            raise ConfigError(
                f"sliding_attention_heads {heads} is not a multiple of sliding_key_value_heads {kv_heads}."
            )
        if self.embedding_rows < self.vocab_size:
            raise ConfigError(f"embedding_rows {self.embedding_rows} are below vocab_size {self.vocab_size}.")
        if (start, end, self.loop_passes, self.loop_gate_rank) == (0, 0, 1, 0):
            return
        decoder.check_sizes(self, "loop_start", "loop_gate_rank")
        if self.loop_passes < 2 or not start < end <= self.stored_layers or start % n or end % n:
            raise ConfigError(
                f"The layers from loop_start {start} to loop_end {end} run loop_passes {self.loop_passes} times; both "
                f"are multiples of layers_per_block {n} within the {self.stored_layers} layers, and passes at least 2."
            )
        if tuple(self.layer_kinds[self.order.index(i)] for i in self.order) != self.layer_kinds:
            raise ConfigError(f"layer_kinds {self.layer_kinds} has other kinds in a later pass of the same layers.")

    @property
    def stored_layers(self) -> int:
        """The number of layers in params["layers"]."""
        return self.num_hidden_layers - (self.loop_passes - 1) * (self.loop_end - self.loop_start)

    @property
    def passes(self) -> tuple[int, ...]:
        """`order` where there is a loop, else ()."""
        return self.order if self.loop_passes > 1 else ()

    @property
    def order(self) -> tuple[int, ...]:
        """The stored layer of each pass."""
        looped = tuple(range(self.loop_start, self.loop_end))
        return (*range(self.loop_start), *looped * self.loop_passes, *range(self.loop_end, self.stored_layers))

    def slides_at(self, stored: int) -> bool:
        """Whether the stored layer of this index has a sliding window."""
        return LayerKind.parse(self.layer_kinds[self.order.index(stored)]).slides

    def heads_of(self, kind: LayerKind) -> tuple[int, int, int, int]:
        """(heads, key heads, width of a head, distances with a bias) of layers of this kind."""
        if kind.slides:
            heads = self.sliding_attention_heads, self.sliding_key_value_heads
            return *heads, self.sliding_head_dim, self.sliding_window
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.relative_extent

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model types inkling2 and inkling2_loop only `text_config` is used.
        """
        fields, found = fields_from_hf(Fields(values), MODEL_TYPES)
        return decoder.finished(Config(**found), fields, ignored=IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for types with a vision tower with `text_config` but no tower."""
        name = "Inkling2Loop" if self.loop_passes > 1 else "Inkling2"
        if not self.model_type.endswith("_text"):
            text = replace(self, model_type=f"{self.model_type}_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": self.model_type}
            return decoder.expressible(self, outer | {"text_config": text.to_hf()})
        made = decoder.decoder_to_hf(self, f"{name}ForCausalLM", **fields_to_hf(self))
        return {name: value for name, value in made.items() if name not in ("rope_parameters", "intermediate_size")}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, stored = config.hidden_size, range(config.stored_layers)
    kinds = parsed(config.layer_kinds[config.order.index(index)] for index in stored)
    tree = decoder_leaves(config, [layer_leaves(config, kind, index) for index, kind in enumerate(kinds)])
    table = replace(tree["embed_tokens"], shape=(config.embedding_rows, D))
    return {"embed_tokens": table, "embed_norm": norm(D, "embed")} | tree | {"embed_tokens": table}


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Any]:
    """{kind: {"attention": causal mask, "order": `fnmodels.inputs.Segments`}}."""
    made, order = (
        decoder.attention_masks(config, positions, segment_ids, **options),
        build_segments(segment_ids, positions),
    )
    both = {kind: {"attention": mask, "order": order} for kind, mask in made.items()}
    return {kind: both[plain] for kind, plain in zip(kinds(config), config.layer_kinds, strict=True)}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"positions": fp32 [B, S], "scale" of queries: fp32 [B, S]}}, and a table of no rotation."""
    places = {"table": no_rotation(positions), "positions": positions.float()}
    scale = log_scale(positions, floor=config.log_floor, alpha=config.log_alpha)
    full, sliding = places | {"scale": scale}, places | {"scale": torch.ones_like(scale)}
    return {kind.name: sliding if kind.slides else full for kind in parsed(kinds(config))}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: normed token embeddings; given embeddings are returned unchanged, as in transformers."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    x = decoder.embed(params, inputs, config=config)
    if tokens.is_floating_point():
        return x
    return rms_norm_fp32_weight(decoder.without_padding(x, inputs), params["embed_norm"], eps=config.rms_norm_eps)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and soft-cap in fp32: logits [B, S, V]."""
    logits = decoder.unembed_fp32_weight(params, x, config=config)
    if not decoder.is_lm(config):
        return logits
    return config.final_softcap * elementwise(torch.tanh, upcast(logits) / config.final_softcap)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tree, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D], the state of its block -> x. It reads and leaves those of other blocks."""
    words, eps, dtype = kind.split("_"), config.rms_norm_eps, x.dtype
    x, blocks, heard = begun(x, ctx, words, config)
    conv = _Convolutions(ctx, mask["order"].segment_ids, x.shape[0], config.conv_kernel)
    messages: tuple[Tensor, ...] = ()
    if heard is not None:
        asked = torch.cat([layer["messages"][name] for name in MESSAGES])
        messages = attend_depth(asked, heard[..., :-1, :], heard[..., -1, :])

    def told(name: str, value: Tensor) -> Tensor:
        if heard is None:
            return value
        return gate_message(layer["gates"][name], value, messages[MESSAGES.index(name)], eps=eps)

    read: tuple[Tensor, ...] = (x,)
    if "opens" not in words:
        read = attend_depth(torch.atleast_2d(layer["attention_query"]), blocks, x)
    read = read if len(read) == 3 else read * 3
    told_apart = [told(name, value) for name, value in zip("qkv", read, strict=True)]
    if "input_layernorm" not in layer:
        weights = (layer[f"{name}_input_layernorm"] for name in "qkv")
        ready = [rms_norm_fp32_weight(v, w, eps=eps) for v, w in zip(told_apart, weights, strict=True)]
    elif heard is None:
        ready = [rms_norm_fp32_weight(read[0], layer["input_layernorm"], eps=eps)] * 3
    else:  # one call for all, which has one tap
        ready = list(rms_norm_fp32_weight(torch.stack(told_apart, -2), layer["input_layernorm"], eps=eps).unbind(-2))
    ready = [value.to(dtype) for value in ready]
    attended = _attention(layer["attention"], ready, mask["attention"], freqs, config, kind, ctx, conv)
    attended = ctx.tap("attention", conv("attention", attended, layer["attention_conv"]))
    begins = "begins" in words
    blocks = torch.cat((blocks, x.unsqueeze(-2)), -2) if begins else blocks
    middle = ctx.tap("middle", upcast(attended) if begins else upcast(x) + upcast(attended))
    value = told("mlp", attend_depth(layer["mlp_query"][None], blocks, middle)[0])
    normed = rms_norm_fp32_weight(value, layer["post_attention_layernorm"], eps=eps).to(dtype)
    fed = ctx.tap("mlp", conv("mlp", _experts(layer["mlp"], normed, config, ctx), layer["mlp_conv"]))
    conv.keep()
    x = (middle + upcast(fed)).to(dtype)
    if "folds" in words:
        return attend_depth(layer["fold_query"][None], blocks, x)[0].to(dtype)
    states = blocks if heard is None or "leaves" in words else torch.cat((blocks, heard), -2)
    # a view, since remat does not allow a block to return what it was given
    ctx.leave(states.view_as(states))
    return x


class _Convolutions:
    """The convolutions of a layer over the same tokens, and what a cache keeps of them."""

    def __init__(self, ctx: Context, segment_ids: Tensor, rows: int, taps: int) -> None:
        self.ctx, self.ids, self.rows, self.state = ctx, segment_ids, rows, ctx.state() or {}
        self.last, self.kernel = self.state.get("segment"), ctx.options.kernel
        self.reads = reads_of(segment_ids, taps, rows, self.last, self.kernel)
        self.tails: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, weight: Tensor, dynamic: Tensor | None = None) -> Tensor:
        """x [B, S, C] beside its convolution; weight: [C, 1, K], or [K, C] beside taps of tokens [B, S, G, K]."""
        given = self.ids, self.state.get(f"{name}_conv"), self.last
        how: dict[str, Any] = {"reads": self.reads, "kernel": self.kernel}
        if dynamic is None:
            x, tail = residual_conv(x, weight, *given, **how)
        else:
            x, tail = dynamic_conv(x, weight, dynamic, *given, **how)
        self.tails[f"{name}_conv"] = tail
        return x

    def keep(self) -> None:
        """Keeps the last inputs of all convolutions."""
        self.ctx.keep(**self.tails, segment=last_segment(self.ids, self.last).expand(self.rows))


def _attention(
    weights: Tree,
    read: list[Tensor],
    mask: Any,
    freqs: Tree,
    config: Config,
    kind: str,
    ctx: Context,
    conv: _Convolutions,
) -> Tensor:
    """Attention of what queries, keys and values read, each [B, S, D], gated and projected: [B, S, D]."""
    *_, size, _ = config.heads_of(LayerKind.parse(kind))
    x, scale = read[0], freqs["scale"][..., None, None]

    def clipped(name: str, width: int, threshold: float) -> Tensor:
        value = split_heads(linear(x, weights[f"{name}_proj"]), width)
        value = l2_clip(upcast(value) * upcast(weights[f"{name}_scale"]), threshold).to(x.dtype)
        return (upcast(value) * scale).to(x.dtype)

    def convolved(name: str, given: Tensor) -> Tensor:
        value, taps = linear(given, weights[f"{name}_proj"]), weights[f"{name}_conv"]
        if f"{name}_taps_proj" not in weights:
            return split_heads(conv(name, value, taps), size)
        own = split_heads(linear(given, weights[f"{name}_taps_proj"]), config.conv_kernel)
        return split_heads(conv(name, value, taps, own), size)

    q = clipped("q", size, config.qk_clip)
    k = l2_clip(convolved("k", read[1]), config.qk_clip)
    v = rms_norm(convolved("v", read[2]), None, eps=config.rms_norm_eps)
    values = clipped("relative", config.relative_dim, config.relative_clip) @ weights["relative_bank"]
    bias = DistanceBias(values, freqs["positions"], freqs["positions"])
    z = ctx.attend(q, k, v, mask, scale=size**-0.5, sinks=linear(x, weights["sink_proj"]), bias=bias)
    gate = elementwise(torch.sigmoid, upcast(split_heads(linear(x, weights["gate_proj"]), size)))
    return project_out(weights, (upcast(z) * gate).to(x.dtype))


def _experts(mlp: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    choice: dict[str, Any] = {"k": config.num_experts_per_tok, "scale": config.routed_scaling_factor}
    route = functools.partial(sigmoid_top_k, bias=mlp["selection_bias"], renormalize=True, **choice)
    act = functools.partial(softcapped_swiglu, gate_cap=config.gate_softcap, up_cap=config.up_softcap)
    return ctx.moe(mlp, x, route, act=act, dtypes=ROUTER)


PRESETS: dict[str, ConfigJson] = {
    "inkling-2-small": {"model_type": "inkling2_text"},
    "inkling-2-mini": {"model_type": "inkling2_loop_text"},
}
