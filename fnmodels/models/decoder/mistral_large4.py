"""Mistral Large 4, the text model (Mistral AI, 2026, 1T-A52B): latent attention to chosen keys, learned frequencies.

A pre-norm decoder with multi-head latent attention, in which each query attends to the keys that a lightning indexer
chooses (`deepseek_v32.py`), or that the one of an earlier layer has chosen; mixtures of experts after the first layers.
Queries have no latent. Each head multiplies them by scale * ln(1 + position) + shift, and the indexer's heads do so
too, so positions count within a document. Rotary frequencies are multiplied by exp(alpha), which is a parameter of the
model. Every fourth layer does not rotate. Logits are soft-capped.

The published files are those of a model with images, of which the text is read; the draft heads in them are not.
Layers that attend to the latents of an earlier layer (`kv_source_layers`) are refused: the published default has none,
and what a layer borrows here is found by the kind of the layer that lends it, not by its number.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import indexed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import (
    Constant,
    Leaf,
    bias,
    decoder_leaves,
    latent_attention_leaves,
    layer_leaves,
    norm,
    weight,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary_interleaved, latent_scale, project_out, rms_norm
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.invariant.rows import elementwise, softmax
from fnmodels.ops.mla import Widths, latent_queries
from fnmodels.ops.moe.router import RouterDtypes, choose, softmax_top_k
from fnmodels.ops.rotary import learned_table, log_positions, scaled_by_position
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mistral_large4_text", "mistral_large4")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=tuple(f"indexed{own}{moe}" for own in ("", "_nope", "_shared", "_shared_nope") for moe in ("", "_moe")),
    routed=True,
    router=ROUTER,
    shares_tables=True,
    in_memory={
        r"\.attention\.": ".self_attn.",
        r"\.wkv_a_with_mqa\.": ".kv_a_proj_with_mqa.",
        r"\.wkv_b\.": ".kv_b_proj.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.kv_a_norm\.": ".kv_a_layernorm.",
        r"\.feed_forward\.": ".mlp.",
        r"(\d)\.(gate|experts|shared_experts)\.": r"\1.mlp.\2.",
        r"\.ssmax_scaling\.s$": ".softmax_scaling.scale",
        r"\.ssmax_scaling\.b$": ".softmax_scaling.bias",
        r"\.wq\.": ".q_proj.",
        r"\.wo\.": ".o_proj.",
        r"\.w1\.": ".gate_proj.",
        r"\.w2\.": ".down_proj.",
        r"\.w3\.": ".up_proj.",
    },
    unread={
        "mtp": r"mtp_dspark\..*",
        "vision": r"(vision_encoder|pre_mm_projector_norm|patch_merger|vision_language_adapter)\..*",
    },
)
_DEFAULTS: dict[str, Any] = {"vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576}
_DEFAULTS |= {"moe_intermediate_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64, "n_shared_experts": 1}
_DEFAULTS |= {"n_routed_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 512, "v_head_dim": 128}
_DEFAULTS |= {"n_group": 1, "topk_group": 1}
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, "attention_factor": 1.0}
_YARN |= {"original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0}
_IMAGES = (  # fields of the wrapper that the text does not read
    *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer"),
    *("multimodal_projector_bias", "spatial_merge_size"),
)
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")


@dataclass(frozen=True, kw_only=True)
class Config(indexed.IndexedConfig):
    """Sizes and switches; layers that do not rotate have qk_rope_head_dim more dimensions without a position."""

    q_lora_rank: int = field(default=0, init=False, compare=False)
    norm_topk_prob: bool = field(default=True, init=False, compare=False)
    num_nextn_predict_layers: int = field(default=0, init=False, compare=False)
    max_position_embeddings: int = 1048576
    final_softcap: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope.dim(self.head_dim) != self.head_dim or self.rope.kind in ("dynamic", "longrope"):
            raise ConfigError(f"rope must rotate all of {self.head_dim} dimensions at any length; it is {self.rope}.")
        if LayerKind.parse(self.layer_kinds[0]).shares_choice:
            raise ConfigError("The first layer must have an indexer: no layer before it makes a choice of keys.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type mistral_large4 only `text_config` is used.
        """
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        outer = outer if model_type == MODEL_TYPES[0] else decoder.text_part(outer, MODEL_TYPES[0], ignored=_IMAGES)
        given = {name: value for name, value in outer.values.items() if value is not None}
        rope = {} if {"rope_parameters", "rope_scaling", "rope_theta"} & given.keys() else {"rope_parameters": _YARN}
        fields = Fields(_DEFAULTS | rope | given, outer.where)
        fields.expect("q_lora_rank", None)
        sizes = mla.latent_from_hf(fields, max_positions=1048576, kv_heads=64, q_rank=0, nope_dim=64, rope_head=True)
        layers, width = sizes["num_hidden_layers"], sizes["qk_rope_head_dim"]
        for name, value in (("rope_interleave", True), ("mlp_bias", False), ("norm_topk_prob", True)):
            fields.expect(name, value)
        fields.expect("kv_source_layers", list(range(layers)))
        for name in ("q_lora_rank", "rope_interleave"):
            del sizes[name]
        experts = mixture.shared_from_hf(fields, layers, dense=1, scale=1.0)
        del experts["layer_kinds"]
        indexed.per_layer(fields, "layer_types", indexed.ATTENTION, ["indexed_attention"] * layers)
        indexers = indexed.per_layer(fields, "indexer_types", indexed.INDEXERS, indexed.indexer_types(fields, layers))
        mlps = ["_moe" if one else "" for one in mixture.routed_layers(fields, layers)]
        config = Config(
            **sizes | experts | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5), "model_type": model_type},
            **fields.plain(index_n_heads=32, index_head_dim=128, index_topk=2048, n_group=1, topk_group=1),
            layer_kinds=tuple(map("".join, zip(indexers, _still(fields, layers), mlps, strict=True))),
            rope=rope_from_hf(fields, head_dim=width, max_positions=sizes["max_position_embeddings"], theta=1e4),
            final_softcap=fields.number("final_logit_softcapping", 30.0),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for model type mistral_large4 with `text_config` but no tower."""
        if self.model_type == "mistral_large4":
            text = replace(self, model_type="mistral_large4_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["MistralLarge4ForConditionalGeneration"]}
            outer |= {"model_type": "mistral_large4", "tie_word_embeddings": self.tie_word_embeddings}
            return decoder.expressible(self, outer | {"text_config": text.to_hf()})
        layers = parsed(self.layer_kinds)
        own = mixture.grouped_to_hf(self) | {"mlp_layer_types": mixture.mlp_types(layers)}
        own |= {"indexer_types": ["shared" if kind.shares_choice else "full" for kind in layers]}
        own |= {"no_rope_layers": [int(kind.rotates) for kind in layers]}
        for name in ("norm_topk_prob", "first_k_dense_replace"):
            del own[name]
        own["final_logit_softcapping"] = self.final_softcap
        names = (*(name for name in mla.NAMES if name != "q_lora_rank"), *_INDEXER)
        return decoder.decoder_to_hf(self, "MistralLarge4ForCausalLM", *names, **own)


def _still(fields: Fields, layers: int) -> list[str]:
    """The word of each layer that does not rotate: 0 in `no_rope_layers`, or the last of `no_rope_layer_interval`."""
    every = fields.integer("no_rope_layer_interval", 4)
    default = [int((i + 1) % every != 0) for i in range(layers)]
    given = fields.take("no_rope_layers", default)
    flags = isinstance(given, list) and all(type(one) is int and one in (0, 1) for one in given)
    if not flags or len(given) < layers:
        raise ConfigError(f"{fields.where}: 'no_rope_layers' is {shown(given)}, but must list 0 or 1 for each layer.")
    return ["" if one else "_nope" for one in given[:layers]]


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""

    def layer(kind: LayerKind) -> Tree:
        widths, heads = _widths(config, kind), config.num_attention_heads
        sizes = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")}
        sizes |= {name: getattr(config, name) for name in ("initializer_range", "v_head_dim", "attention_bias")}
        own: Any = SimpleNamespace(
            **sizes, q_lora_rank=None, qk_nope_head_dim=widths.nope, qk_rope_head_dim=widths.rope
        )
        attention: dict[str, Tree] = {**latent_attention_leaves(own), **_scaling(heads, "heads")}
        attention |= {} if kind.shares_choice else {"indexer": _indexer_leaves(config)}
        mlp = mixture.grouped_leaves(config, kind, selection_bias=False, wide_router=True)
        return layer_leaves(config.hidden_size, attention, mlp)

    tree = decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])
    pairs = config.qk_rope_head_dim // 2
    alpha = Leaf((pairs,), torch.float32, ("frequency",), Constant(0.0), decay=False, keep_dtype=True)
    return tree | {"rope_alpha": alpha}


def _scaling(heads: int, axis: str) -> dict[str, Leaf]:
    """Factors of ln(1 + position) of each head, and what is added to them: queries are not scaled at first."""
    return {"query_scale": bias(heads, axis), "query_shift": norm(heads, axis)}


def _indexer_leaves(config: Config) -> dict[str, Leaf]:
    """Parameters of `ops.indexer`; every process of tensor parallelism has all heads, to choose alike."""
    D, heads, width = config.hidden_size, config.index_n_heads, config.index_head_dim
    leaves = indexed.indexer_leaves(config) | _scaling(heads, "latent")
    leaves["q_b_proj"] = weight((heads * width, D), ("latent", "embed"), config.initializer_range)
    leaves |= {"input_scale": norm(D, "embed"), "input_shift": bias(D, "embed")}
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


_ENDS = {"embed_tokens": "tok_embeddings.weight", "norm": "norm.weight", "lm_head": "output.weight"}
_ENDS |= {"rope_alpha": "lerope.alpha", "score": "score.weight", "score_bias": "score.bias"}
_LAYER = {"input_layernorm": "attention_norm.weight", "post_attention_layernorm": "ffn_norm.weight"}
_LAYER |= {"q_proj": "wq.weight", "kv_a_proj": "wkv_a_with_mqa.weight", "kv_a_bias": "wkv_a_with_mqa.bias"}
_LAYER |= {"kv_a_layernorm": "kv_a_norm.weight", "kv_b_proj": "wkv_b.weight", "o_proj": "wo.weight"}
_LAYER |= {"o_bias": "wo.bias", "query_scale": "ssmax_scaling.s", "query_shift": "ssmax_scaling.b"}
_LAYER |= {"q_b_proj": "wq_b.weight", "k_proj": "wk.weight", "k_norm": "k_norm.weight", "k_norm_bias": "k_norm.bias"}
_LAYER |= {"input_scale": "q_input_norm.weight", "input_shift": "q_input_norm.bias"}
_LAYER |= {"weights_proj": "weights_proj.weight", "router": "weight"}
_LAYER |= {"gate_proj": "w1.weight", "down_proj": "w2.weight", "up_proj": "w3.weight"}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names: dict[str, Stored] = {}
    routed = [kind.routed for kind in parsed(config.layer_kinds)]
    for path in flatten(spec(config)):
        if path in _ENDS:
            names[path] = _ENDS[path]
            continue
        where, _, leaf = path.rpartition(".")
        mlp = "" if routed[int(path.split(".")[1])] else ".feed_forward"
        where = where.replace(".mlp", mlp).replace(".shared_expert", ".shared_experts")
        where += ".gate" if leaf == "router" else ""
        there = _LAYER[leaf]
        experts = where.endswith(".experts")
        names[path] = mixture.expert_names(where, config.n_routed_experts, there) if experts else f"{where}.{there}"
    return names


def in_memory(config: Config) -> dict[str, str]:
    """{pattern in a published name: what transformers' modules have there}, of the ends of the model."""
    model = "model." if config.model_type == "mistral_large4_text" else "model.language_model."
    ends = {"tok_embeddings": f"{model}embed_tokens", "lerope": f"{model}rotary_emb", "output": "lm_head"}
    ends |= {name: model + name for name in ("layers", "norm")}
    return {rf"^{theirs}\.": f"{ours}." for theirs, ours in ends.items()}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": that of `config.rope`, "log_position": fp32 [B, S]}}; `shared` makes the table with alpha."""
    tables, logs = decoder.freqs_cis(config, positions, length=length), log_positions(positions)
    return {kind: {"table": table, "log_position": logs} for kind, table in tables.items()}


def shared(params: Tree, inputs: Any, /, *, config: Config) -> Tree:
    """{"table": fp32 [B, S, R/2, 2] of learned frequencies}; ValueError for bare tokens, which have no positions."""
    if not isinstance(inputs, Mapping) or "positions" not in inputs:
        raise ValueError(
            "The rotary frequencies of Mistral Large 4 are parameters, so it needs the dict of inputs that `prepare` "
            "makes, with tokens and positions; bare token ids or vectors do not say where they stand."
        )
    return {"table": learned_table(config.rope, config.head_dim, inputs["positions"], params["rope_alpha"])}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and soft-cap: logits [B, S, V]."""
    logits, cap = decoder.unembed(params, x, config=config), config.final_softcap
    return cap * elementwise(torch.tanh, logits / cap) if decoder.is_lm(config) else logits


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, own = config.rms_norm_eps, layer["attention"], LayerKind.parse(kind)
    learned = ctx.shared("table") if own.rotates else None  # none is given where shapes alone are asked for
    table, logs = freqs["table"] if learned is None else learned, freqs["log_position"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    indexer = Indexer(config.index_topk, apply_rotary_interleaved, scaled=functools.partial(_scaled, logs))
    mask = ctx.choose(weights, normed, table, mask, indexer=indexer)
    widths = _widths(config, own)
    how: Any = {"widths": widths, "rotate": apply_rotary_interleaved}
    q = _scaled(logs, latent_queries(weights, normed, table, **how), weights)
    scale = latent_scale(config.rope, widths.nope + widths.rope)
    mixed = ctx.attend_latent(weights, normed, table, mask, **how, scale=scale, queries=q)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(_softmax_top_k, **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", mixture.feed(layer["mlp"], normed, config, ctx, route=route, dtypes=ROUTER))


def _widths(config: Config, kind: LayerKind) -> Widths:
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    nope, rope = (nope, rope) if kind.rotates else (nope + rope, 0)
    return Widths(nope, rope, config.v_head_dim, eps=config.rms_norm_eps)


def _scaled(log_position: Tensor, q: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return scaled_by_position(q, log_position, weights["query_scale"], weights["query_shift"])


def _softmax_top_k(
    logits: Tensor, indices: Tensor | None = None, *, groups: tuple[int, int], **choice: Any
) -> tuple[Tensor, Tensor]:
    """`softmax_top_k` in groups of experts by their best two, where experts of other groups count as 0."""
    if indices is None:
        indices = choose(softmax(upcast(logits)), choice["k"], groups=groups, best=2, outside=0.0)
    return softmax_top_k(logits, indices, **choice)


PRESETS: dict[str, ConfigJson] = {"mistral-large-4-1t": {"model_type": "mistral_large4_text"}}
