"""Hy4 (Tencent, 2026, 770B-A49B) and its preview: latent attention to chosen keys, in streams that are not mixed.

A decoder whose residual stream has `residual_streams` rows, joined to each sublayer by hyper-connections without comb
(`fnmodels.ops.streams.hyper`). Multi-head latent attention, in which each query attends to the keys that a lightning
indexer chooses or takes of the last layer before that has one, has a sink logit for each head and a gate for each
element of what heads read. A mixture of experts follows after the first layers; the routed experts alone have a clamped
SwiGLU. The head computes in fp32.

The choice has no gradient, so a loss on logits does not train the indexer. Files may have an MTP head, see
`fnmodels.mtp`, whose block is a layer with experts and an indexer on one residual stream.

The published weights rotate neighbours (2i, 2i + 1), as vLLM does (https://github.com/vllm-project/vllm/pull/54160).
transformers 5.24 rotates halves in `hy_v4`, whatever a file says, and neighbours in `hy_v4_vl_text`, the text of Hy4
with images; here only a file with "rope_interleave": false asks for halves. Other than the preview's, that text has
positions of three axes, and norms of latents with the eps of all others.
"""

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed  # noqa: F401
from fnmodels.models.common.deepseek_v4.streams import by_ends, ended, hyper_leaves, tap_mean, through, with_ends
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import indexed
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf, split_sections
from fnmodels.models.common.spec import (
    Constant,
    Leaf,
    Parts,
    decoder_leaves,
    latent_attention_leaves,
    layer_leaves,
    weight,
)
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import (
    apply_rotary,
    apply_rotary_interleaved,
    gated_mlp,
    latent_scale,
    project_out,
    rms_norm,
    split_heads,
    upcast,
)
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.mla import LATENT_EPS
from fnmodels.ops.mlp import clamped_glu, glu
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.ops.rotary import apply_rotary_last
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("hy_v4", "hy_v4_vl_text")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("indexed", "indexed_moe", "indexed_shared", "indexed_shared_moe"),
    routed=True,
    router=ROUTER,
    sinks=True,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    in_memory={
        r"\.hc_attn_layer\.hc_pre\.hc_": ".attn_hc.",
        r"\.hc_mlp_layer\.hc_pre\.hc_": ".ffn_hc.",
        r"\.hc_head_": ".hc_",
        r"\.learnable_sink_param$": ".sinks",
        r"\.linear_gate\.": ".gate_proj.",
    },
    resaved={
        r"model\.(?:hc_pre\.hc_head|hc_head\.hc_pre)\.(.*)": r"model.hc_head.\1",
        r"(.*)\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.(.*)": r"\1.\2.hc_pre.\3",
        r"(.*\.mlp|.*\.mlp\.shared_experts)\.linear_gate\.(.*)": r"\1.gate_proj.\2",
    },
)
_INDEXER = {"full": "indexed", "shared": "indexed_shared"}
_DEFAULTS: dict[str, Any] = {"vocab_size": 120832, "hidden_size": 2816, "intermediate_size": 6912}
_DEFAULTS |= {"moe_intermediate_size": 768, "num_hidden_layers": 34, "num_attention_heads": 32, "n_shared_experts": 1}
_DEFAULTS |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512, "v_head_dim": 256}
_DEFAULTS |= {"n_group": 1, "topk_group": 1, "initializer_range": 0.006, "rms_norm_eps": 1e-5}
_DEFAULTS |= {"q_lora_rank": 1536, "index_n_heads": 16, "num_nextn_predict_layers": 0}
_FULL = {"hidden_size": 6144, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 78}
_FULL |= {"num_attention_heads": 64, "q_lora_rank": 2048, "index_n_heads": 32}
_HEADS = "num_nextn_predict_layers"
_SECTIONS = (12, 10, 10)  # `mrope_section` of a file without one


@dataclass(frozen=True, kw_only=True)
class Config(indexed.IndexedConfig):
    """Sizes and switches. hyper_magnitude: the largest weight of a sublayer's output in a stream.

    latent_eps: of the norms of latents. mrope_section: rotary frequencies of time, height and width, of a text with
    images.
    """

    rope_interleave: bool = True
    swiglu_limit: float = 10.0
    residual_streams: int = 4
    hyper_magnitude: float = 2.0
    hyper_eps: float = 1e-6
    latent_eps: float = LATENT_EPS
    mrope_section: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, mtp_kinds(self), most=1)
        if "shared" in self.layer_kinds[0]:
            raise ConfigError("The first layer must have an indexer: no layer before it makes a choice of keys.")
        if self.residual_streams < 2:
            raise ConfigError(f"residual_streams is {self.residual_streams} and must be at least 2.")
        if self.mrope_section and sum(self.mrope_section) != self.qk_rope_head_dim // 2:
            raise ConfigError(
                f"mrope_section {list(self.mrope_section)} must add up to {self.qk_rope_head_dim // 2}, half of "
                "qk_rope_head_dim."
            )

    @property
    def hyper(self) -> HyperConnection:
        """The settings of its hyper-connections."""
        return HyperConnection(0, self.hyper_eps, self.rms_norm_eps, self.hyper_magnitude, self.hyper_eps)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        Fields(values).integer("num_key_value_heads", 1)
        images = values.get("model_type") == "hy_v4_vl_text"
        usual = _DEFAULTS | (_FULL if images else {})
        one = {_HEADS: 1} if values.get(_HEADS) == 2 else {}  # files with one head count it so, too
        fields = Fields(usual | {name: value for name, value in values.items() if name not in _UNREAD} | one)
        model_type = fields.choice("model_type", MODEL_TYPES)
        fields, sections, interleaved = split_sections(fields) if images else (fields, (), True)
        if not interleaved:
            raise UnsupportedError(f"{fields.where}, rope: 'mrope_interleaved' is false; only true is supported.")
        for name, value in _FIXED.items():
            fields.expect(name, value)
        sizes = mla.latent_from_hf(fields, max_positions=262144, kv_heads=0, q_rank=1536, nope_dim=192, rope_head=True)
        layers, width = sizes["num_hidden_layers"], sizes["qk_rope_head_dim"]
        experts = mixture.grouped_from_hf(fields, layers, dense=1, scale=2.827)
        indexed.per_layer(fields, "layer_types", indexed.ATTENTION, ["indexed_attention"] * layers)
        default = ["shared" if i and (i - 1) % 4 else "full" for i in range(layers)]
        indexers = indexed.per_layer(fields, "indexer_types", _INDEXER, default)
        routed = mixture.routed_layers(fields, layers)
        experts["layer_kinds"] = tuple(kind + "_moe" * one for kind, one in zip(indexers, routed, strict=True))
        config = Config(
            **sizes | experts | {"q_lora_rank": fields.integer("q_lora_rank")},
            **fields.plain(index_n_heads=16, index_head_dim=128, index_topk=2048, swiglu_limit=10.0),
            latent_eps=sizes["rms_norm_eps"] if images else LATENT_EPS,
            mrope_section=(sections or _SECTIONS) if images else (),
            model_type=model_type,
            residual_streams=fields.integer("hc_mult", 4, low=2),
            hyper_magnitude=fields.number("hc_magnitude", 2.0),
            hyper_eps=fields.number("hc_eps", 1e-6),
            rope=rope_from_hf(fields, head_dim=width, max_positions=sizes["max_position_embeddings"], theta=1e4),
        )
        return decoder.finished(config, fields, ignored=_IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        kinds = parsed(self.layer_kinds)
        own = mixture.grouped_to_hf(self) | {"mlp_layer_types": mixture.mlp_types(kinds)}
        own |= {"indexer_types": ["shared" if kind.shares_choice else "full" for kind in kinds]}
        own |= {"hc_mult": self.residual_streams, "hc_magnitude": self.hyper_magnitude, "hc_eps": self.hyper_eps}
        del own["first_k_dense_replace"]
        sections = {"mrope_section": list(self.mrope_section)} if self.mrope_section else {}
        own["rope_parameters"] = rope_to_hf(self.rope) | sections
        architecture = "HYV4VLForCausalLM" if self.model_type == "hy_v4_vl_text" else "HYV4ForCausalLM"
        names = (*mla.NAMES, "rope_interleave", "index_n_heads", "index_head_dim", "index_topk", "swiglu_limit")
        own[_HEADS] = self.num_nextn_predict_layers
        return decoder.decoder_to_hf(self, architecture, *names, **own)


# Switches of Tencent's code, which transformers has at these values alone.
_FIXED = {"gated_mla": True, "gating_type": "elementwise", "learnable_sink": True, "enable_ihc": True}
_FIXED |= {"mlp_bias": False}
_IGNORED = ("enable_lm_head_fp32", "learnable_sink_init")
_UNREAD = ("num_key_value_heads",)  # 8 in published files


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, see `deepseek_v4.streams`."""
    return with_ends(config.layer_kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; what transformers keeps in fp32 stays so here."""
    D, n, heads, value = config.hidden_size, config.residual_streams, config.num_attention_heads, config.v_head_dim
    start, last = -math.log(n - 1), config.num_hidden_layers - 1  # all streams together weigh 1

    def connection(rows: int, scales: int, *parts: float) -> dict[str, Leaf]:
        fn, base, scale = hyper_leaves(config, rows, scales).values()
        return {"fn": fn, "base": replace(base, init=Parts(parts)), "scale": replace(scale, init=Constant(0.01))}

    joined, fold = connection(2 * n, 2, start, 0.0), connection(n, 1, start)
    attention: Tree = latent_attention_leaves(config)
    attention["gate_proj"] = weight((heads * value, D), ("heads", "embed"), config.initializer_range, unit=value)
    attention["sinks"] = Leaf((heads,), torch.float32, ("heads",), Constant(0.0), decay=False, keep_dtype=True)
    indexer = indexed.indexer_leaves(config)
    indexer |= {name: replace(leaf, keep_dtype=True) for name, leaf in indexer.items() if name in _WIDE}

    def plain(kind: LayerKind) -> Tree:
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True, wide_router=True)
        return layer_leaves(D, attention if kind.shares_choice else attention | {"indexer": indexer}, mlp)

    def layer(index: int, kind: LayerKind) -> Tree:
        ends = {"fold": fold} if index == last else {}
        return plain(kind) | {"attention_hyper": joined, "mlp_hyper": joined} | ends

    leaves = decoder_leaves(config, [layer(i, kind) for i, kind in enumerate(parsed(config.layer_kinds))])
    leaves |= mtp.heads(config, plain(*parsed(mtp_kinds(config))))
    return leaves | ({"lm_head": replace(leaves["lm_head"], keep_dtype=True)} if "lm_head" in leaves else {})


_WIDE = ("weights_proj", "k_norm", "k_norm_bias")  # of an indexer


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return ("indexed_moe",)


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"model\.mtp_layers\..*",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its slice of the tensor of all experts}."""
    paths = [path for path in flatten(spec(config)) if not path.startswith("mtp.")]
    names = indexed.indexer_names(mla.latent_names(mixture.grouped_names(config, paths)))
    for index, kind in enumerate(parsed(config.layer_kinds)):
        where = f"layers.{index}"
        names[f"{where}.attention.sinks"] = f"model.{where}.self_attn.learnable_sink_param"
        gate = f"{where}.attention.gate_proj"
        names[gate] = renamed(names[gate], r"\.gate_proj\.", ".linear_gate.")
        if kind.routed:
            names |= mixture.stacked_experts(f"{where}.mlp.experts", config.moe_intermediate_size)
        for ours, theirs in (("attention_hyper", "hc_attn_layer"), ("mlp_hyper", "hc_mlp_layer")):
            for leaf in ("fn", "base", "scale"):
                names[f"{where}.{ours}.{leaf}"] = f"model.{where}.{theirs}.hc_pre.hc_{leaf}"
    for path in (path for path in paths if ".fold." in path):
        names[path] = f"model.hc_head.hc_head_{path.rpartition('.')[2]}"
    if not config.num_nextn_predict_layers:
        return names
    # vLLM, vllm/models/hy_v4/nvidia/mtp.py: these names, and the maths of the head, whose stream is not several rows.
    block_names = {path: name for path, name in hf_names(mtp.blocks(config)[0]).items() if not _STREAMS.search(path)}
    return names | mtp.names_of(config, block_names, "model.mtp_layers.{}.")


_STREAMS = re.compile(r"\.(attention_hyper|mlp_hyper|fold)\.")


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Any]:
    """{kind: mask}, causal; positions and segment_ids [B, S]."""
    return by_ends(config.layer_kinds, decoder.attention_masks(config, positions, segment_ids, **options))


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}, one for all kinds."""
    return by_ends(config.layer_kinds, decoder.freqs_cis(config, positions, length=length))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V], of tokens in fp32 or wider."""
    normed = rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    if not decoder.is_lm(config):
        return decoder.project(params, normed, config)
    head = decoder.head(params, config)
    return upcast(decoder.project(params, normed.to(torch.promote_types(normed.dtype, head.dtype)), config))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it."""
    eps, how = config.rms_norm_eps, config.hyper

    def attend(x: Tensor) -> Tensor:
        weights, own_eps = layer["attention"], config.latent_eps
        widths = mla.latent_widths(config)._replace(eps=own_eps, query_eps=own_eps)
        normed = rms_norm(x, layer["input_layernorm"], eps=eps)
        rotate = apply_rotary_interleaved if config.rope_interleave else apply_rotary
        indexer = Indexer(config.index_topk, functools.partial(apply_rotary_last, rotate=rotate), eps, own_eps)
        chosen = ctx.choose(weights, normed, freqs, mask, indexer=indexer)
        scale = latent_scale(config.rope, widths.nope + widths.rope)
        mixed = ctx.attend_latent(weights, normed, freqs, chosen, widths=widths, rotate=rotate, scale=scale)
        gate = elementwise(torch.sigmoid, upcast(split_heads(linear(normed, weights["gate_proj"]), widths.value)))
        return ctx.tap("attention", project_out(weights, (mixed * gate).to(x.dtype)))

    def feed(x: Tensor) -> Tensor:
        normed, mlp = rms_norm(x, layer["post_attention_layernorm"], eps=eps), layer["mlp"]
        if "router" not in mlp:
            return ctx.tap("mlp", gated_mlp(mlp, normed, activation=config.hidden_act, tap=ctx.tap))
        act = functools.partial(clamped_glu, activation="silu", limit=config.swiglu_limit)
        acts = act, functools.partial(glu, activation=config.hidden_act)
        return ctx.tap("mlp", ctx.moe(mlp, normed, mixture.grouped_route(mlp, config), act=acts, dtypes=ROUTER))

    if "attention_hyper" not in layer:  # the block of an MTP head
        x = ctx.tap("middle", x + attend(x))
        return x + feed(x)
    x = hyper.opened(x, config.residual_streams) if x.ndim == 3 else x
    x = tap_mean(ctx, "middle", through(layer["attention_hyper"], x, attend, how))
    return ended(ctx, layer, through(layer["mlp_hyper"], x, feed, how), how)


PRESETS: dict[str, ConfigJson] = {
    "hy4-preview": {"model_type": "hy_v4", "hidden_size": 6144, "intermediate_size": 18432, "num_hidden_layers": 78}
    | {"num_attention_heads": 64, "q_lora_rank": 2048, "moe_intermediate_size": 2048, "index_n_heads": 32}
    | {"rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"}, "max_position_embeddings": 1048576}
}
