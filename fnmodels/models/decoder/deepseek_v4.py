"""DeepSeek V4 (Flash 284B-A13B, Pro 1.6T-A49B): compressed attention in residual streams of several rows.

A decoder whose residual stream has `residual_streams` rows, joined to each sublayer by manifold-constrained
hyper-connections (arXiv 2512.24880). Queries come from a latent; all heads share one key, which is the value too, and
since that is rotated, what heads read is rotated back by the query's position. Every layer attends to the last
`sliding_window` tokens; beside them

    sliding      to nothing
    indexed      to a few keys of windows of `indexed_ratio` tokens, which overlap and which a lightning indexer chooses
    compressed   to all keys of windows of `compressed_ratio` tokens

with sink logits. The output projection is of low rank within groups of heads. Every layer is a mixture of experts with
a shared one, all with a clamped SwiGLU; in the first, "hash" layers the token's id says which experts it takes.

The choice of windows has no gradient: `train.losses.indexer_loss` trains the indexers, a loss on logits does not. MTP
heads read the rows of the stream before they are folded (`fnmodels.mtp`): inference/model.py in DeepSeek's own files
has the maths. The block of a head is a sliding layer.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Causal, Window
from fnmodels.inputs.windows import build_windows
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed  # noqa: F401
from fnmodels.models.common.deepseek_v4.attention import project_heads, rotate, rotated_back
from fnmodels.models.common.deepseek_v4.config import (
    ATTENTION,
    COMPRESSED,
    FIXED,
    INDEXED,
    MLP,
    SIZES,
    layer_kinds_of,
    ratios_of,
    ropes_of,
    ropes_to_hf,
)
from fnmodels.models.common.deepseek_v4.leaves import attention_leaves, experts_leaves, wide_norm
from fnmodels.models.common.deepseek_v4.names import IN_MEMORY, RESAVED, stored
from fnmodels.models.common.deepseek_v4.streams import ended, hyper_leaves, tap_mean, through, with_ends
from fnmodels.models.common.deepseek_v4.windows import Compressor, attend_to_windows, choose_windows, window_keys
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, rms_norm, rms_norm_fp32_weight, rotary_table, split_heads
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, clamped_glu
from fnmodels.ops.moe.router import RouterDtypes, sqrt_softplus_top_k
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v4",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
_KINDS = tuple(attention + mlp for mlp in MLP.values() for attention in ("compressed", "indexed", "sliding"))
TRAITS = Traits(
    kinds=_KINDS,
    routed=True,
    router=ROUTER,
    sinks=True,
    reads_ids=True,
    dropout={},
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="streams",
    in_memory=IN_MEMORY,
    resaved=RESAVED,
)


@dataclass(frozen=True, kw_only=True)
class Config(mixture.SharedConfig):
    """Sizes and switches."""

    intermediate_size: int = field(init=False, compare=False)  # moe_intermediate_size: every layer has experts
    num_key_value_heads: int = field(default=1, init=False)
    local_rope: Rope = Rope(partial=0.125)  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-6
    q_lora_rank: int
    o_lora_rank: int  # of each of the groups
    o_groups: int
    sliding_window: int
    indexed_ratio: int = 4
    compressed_ratio: int = 128
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # windows of a query
    swiglu_limit: float
    residual_streams: int
    sinkhorn_iterations: int
    hyper_eps: float = 1e-6
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use

    def __post_init__(self) -> None:
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
        mtp.check_kinds(self, ())  # their layers have a mask and a table of their own
        decoder.check_sizes(self, "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "index_topk")
        decoder.check_sizes(self, "indexed_ratio", "compressed_ratio", "residual_streams", "sinkhorn_iterations")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(f"o_groups {self.o_groups} does not divide num_attention_heads.")
        if self.index_head_dim < (rotary := self.rope.dim(self.head_dim)):
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below the {rotary} dimensions that rotate.")

    @property
    def hyper(self) -> HyperConnection:
        """The settings of its hyper-connections."""
        return HyperConnection(self.sinkhorn_iterations, self.hyper_eps, self.rms_norm_eps)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields({"intermediate_size": values.get("moe_intermediate_size", 2048), **values})
        inner = fields.integer("moe_intermediate_size", 2048)
        fields.expect("intermediate_size", inner)
        fields.expect("num_key_value_heads", 1)
        sizes = decoder.decoder_sizes(fields, max_positions=1048576, tied=False, kv_heads=1, head_dim=512)
        for name in ("intermediate_size", "num_key_value_heads"):
            del sizes[name]
        for name, value in FIXED.items():
            fields.expect(name, value)
        layers = sizes["num_hidden_layers"]
        heads = fields.integer("num_nextn_predict_layers", 1, low=0, high=mixture.HEADS_LIMIT)
        ratios = ratios_of(fields)
        ropes = ropes_of(fields, sizes["head_dim"], sizes["max_position_embeddings"])
        config = Config(
            **sizes,
            **fields.plain(**SIZES, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-6),
            moe_intermediate_size=inner,
            n_routed_experts=fields.integer("n_routed_experts", 256, high=mixture.experts_limit(layers + heads)),
            rope=ropes["compress"],
            local_rope=ropes["main"],
            indexed_ratio=ratios[INDEXED],
            compressed_ratio=ratios[COMPRESSED],
            residual_streams=fields.integer("hc_mult", 4),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters", 20, high=1000),
            hyper_eps=fields.number("hc_eps", 1e-6),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=layer_kinds_of(fields, layers, heads, ratios),
            num_nextn_predict_layers=heads,
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        return decoder.finished(config, fields, ignored=("expert_dtype", "ep_size", "n_group", "topk_group"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect of transformers."""
        kinds = parsed(self.layer_kinds)
        words = {kind: name for name, kind in ATTENTION.items()}
        own: ConfigJson = {
            "layer_types": [words[kind.attends] for kind in kinds],
            "mlp_layer_types": ["hash_moe" if "_hash" in kind.name else "moe" for kind in kinds],
            "compress_rates": {INDEXED: self.indexed_ratio, COMPRESSED: self.compressed_ratio},
            "rope_parameters": ropes_to_hf(self),
            "qk_rope_head_dim": self.rope.dim(self.head_dim),
            "hc_mult": self.residual_streams,
            "hc_sinkhorn_iters": self.sinkhorn_iterations,
            "hc_eps": self.hyper_eps,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        names = (*SIZES, "n_routed_experts", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hidden_act")
        own["num_nextn_predict_layers"] = self.num_nextn_predict_layers
        made = decoder.decoder_to_hf(self, "DeepseekV4ForCausalLM", *names, **own)
        del made["intermediate_size"]
        return made


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, see `deepseek_v4.streams`."""
    return with_ends(config.layer_kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    n, norm = config.residual_streams, wide_norm(config.hidden_size, "embed")
    connection = hyper_leaves(config, (2 + n) * n, 3)

    def layer(kind: LayerKind, *, folds: bool) -> Tree:
        return {
            "attention_hyper": connection,
            "input_layernorm": norm,
            "attention": attention_leaves(config, kind),
            "mlp_hyper": connection,
            "post_attention_layernorm": norm,
            "mlp": experts_leaves(config, kind),
            **({"fold": hyper_leaves(config, n, 1)} if folds else {}),
        }

    *inner, last = parsed(config.layer_kinds)
    leaves = decoder_leaves(config, [*(layer(kind, folds=False) for kind in inner), layer(last, folds=True)])
    (of_head,) = parsed(mtp_kinds(config))
    heads = mtp.stream_heads(config, layer(of_head, folds=True), dict.fromkeys(("enorm", "hnorm", "norm"), norm))
    return leaves | {"norm": norm} | heads


stream_norm = rms_norm_fp32_weight


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of an MTP head."""
    return ("sliding_moe",)


def _kinds_with_heads(config: Config) -> list[LayerKind]:
    """The kinds of the layers of the model and of its MTP heads, each of them once."""
    return parsed(sorted({*kinds(config), *(mtp.kinds_of(config) if config.num_nextn_predict_layers else ())}))


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of MTP heads that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"mtp\..*",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, which are DeepSeek's own."""
    return {path: stored(path, config) for path in flatten(spec(config))}


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, Any]:
    """{kind: the mask of the last tokens; with "windows" beside it where a layer reads keys of windows}."""
    near: MaskLike = build_mask(Causal() & Window(config.sliding_window), positions, segment_ids, create=create)
    found: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for kind in _kinds_with_heads(config):
        ratio = {"indexed": config.indexed_ratio, "compressed": config.compressed_ratio}.get(kind.attends)
        if ratio is not None and ratio not in made:
            made[ratio] = {"attention": near, "windows": build_windows(positions, segment_ids, ratio)}
        found[kind.name] = near if ratio is None else made[ratio]
    return found


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Any]:
    """{kind: its table; of layers with windows {"table", "start": of the first position of each token's window}}."""
    table = rotary_table(config.local_rope, config.head_dim, positions, length)
    scaled = rotary_table(config.rope, config.head_dim, positions, length)
    found: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for kind in _kinds_with_heads(config):
        ratio = {"indexed": config.indexed_ratio, "compressed": config.compressed_ratio}.get(kind.attends)
        if ratio is not None and ratio not in made:
            first = positions - positions % ratio
            made[ratio] = {
                "table": scaled,
                "start": rotary_table(config.rope, config.head_dim, first, length),
            }
        found[kind.name] = table if ratio is None else made[ratio]
    return found


def shared(params: Tree, inputs: Tree, /, *, config: Config) -> Tree:
    """{"ids": the token ids [B, S]}, by which hash layers choose experts; ValueError where there are vectors alone."""
    ids = inputs["token_ids"] if "token_ids" in inputs else inputs["tokens"]
    if ids.is_floating_point():
        if all("_hash" not in kind for kind in config.layer_kinds):
            return {}
        raise ValueError(
            "The first layers of a DeepSeek V4 choose experts by token ids, and the inputs hold vectors alone: add "
            'int64 ids [B, S] as inputs["token_ids"].'
        )
    return {"ids": ids}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V]."""
    return decoder.project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Any, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it."""
    eps, how = config.rms_norm_eps, config.hyper
    x = hyper.opened(x, config.residual_streams) if x.ndim == 3 else x

    def attend(x: Tensor) -> Tensor:
        normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
        return ctx.tap("attention", _attention(layer["attention"], normed, mask, freqs, config, ctx))

    def feed(x: Tensor) -> Tensor:
        normed = rms_norm_fp32_weight(x, layer["post_attention_layernorm"], eps=eps)
        act = functools.partial(clamped_glu, activation=config.hidden_act, limit=config.swiglu_limit)
        route = functools.partial(
            sqrt_softplus_top_k,
            k=config.num_experts_per_tok,
            bias=layer["mlp"].get("selection_bias"),
            hashed=_hashed(layer["mlp"], ctx),
            scale=config.routed_scaling_factor,
        )
        return ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=act, dtypes=ROUTER))

    x = tap_mean(ctx, "middle", through(layer["attention_hyper"], x, attend, how))
    return ended(ctx, layer, through(layer["mlp_hyper"], x, feed, how), how)


def _hashed(mlp: Tree, ctx: Context) -> Tensor | None:
    """The experts [B, S, k] of the tokens' ids; None where scores choose. ValueError without ids."""
    if "tid2eid" not in mlp:
        return None
    ids = ctx.shared("ids")
    if ids is None:
        raise ValueError('This layer chooses experts by token ids: pass shared={"ids": int64 [B, S]}.')
    # Files are checked when they are read; memory that was never filled may hold NaN or any number.
    return mlp["tid2eid"][ids].nan_to_num().round().long().clamp(0, mlp["router"].shape[0] - 1)


def _attention(weights: Tree, x: Tensor, mask: Any, freqs: Any, config: Config, ctx: Context) -> Tensor:
    eps, scale = config.rms_norm_eps, config.head_dim**-0.5
    table = freqs["table"] if isinstance(freqs, Mapping) else freqs
    latent = rms_norm_fp32_weight(linear(x, weights["q_a_proj"]), weights["q_a_layernorm"], eps=eps)
    q = rms_norm(split_heads(linear(latent, weights["q_b_proj"]), config.head_dim), None, eps=eps)
    kv = rms_norm_fp32_weight(linear(x, weights["kv_proj"]), weights["kv_a_layernorm"], eps=eps).unsqueeze(-2)
    q, kv = rotate(q, table), rotate(kv, table)
    if "compressor" not in weights:
        z = ctx.attend(q, kv, kv, mask, scale=scale, sinks=weights["sinks"])
    else:
        how = Compressor("window", "indexer" in weights, eps, rotate)
        windows = window_keys(ctx, weights["compressor"], x, mask["windows"], freqs["start"], how=how)
        choices = None
        if "indexer" in weights:
            indexer, own = Indexer(config.index_topk, rotate), replace(how, name="index")
            choices = choose_windows(ctx, weights["indexer"], (x, latent), mask, freqs, indexer=indexer, how=own)
        z = attend_to_windows(ctx, q, kv, mask, windows, choices=choices, scale=scale, sinks=weights["sinks"])
    return project_heads(weights, rotated_back(z, table), config.o_lora_rank)


PRESETS: dict[str, ConfigJson] = {
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    }
}
