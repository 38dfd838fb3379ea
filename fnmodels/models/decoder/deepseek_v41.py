"""DeepSeek V4.1 (Flash, 552B and 196B in tables): V4's layers over keys of windows that layers share, and n-grams.

Attention, experts and residual streams are those of DeepSeek V4, but for queries without a norm of heads, and for
hyper-connections whose maps are read one sublayer late (`hyper.connect_late`), so that the last of them folds the
streams. Each layer attends to the last `sliding_window` tokens. Beside them

    sliding         to nothing
    indexed         to a few keys of windows of 2 tokens, or of 1, that it makes and chooses
    indexed, reads  to a few of the last keys that a layer before it has made, by a choice of its own
    shared          to the keys and the choice of the layer before it

(`fnmodels.ops.indexers.shared_windows`). From one of the layers that make keys on, later choices are among the windows
that it scores highest. Some layers add n-grams of tokens to the streams (`fnmodels.ops.streams.engram`). The choice has
no gradient: `train.losses.indexer_loss` trains the indexers. The rounding of keys and activations to fp8 and fp4 of
DeepSeek's own code is left out. The tower of images and the drafting heads of `mtp.*` are not read.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Causal, Window
from fnmodels.inputs.windows import build_windows
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, ngram_inputs  # noqa: F401
from fnmodels.models.common.deepseek_v4.attention import project_heads, rotate, rotated_back
from fnmodels.models.common.deepseek_v4.config import FIXED, SIZES, ropes_of, ropes_to_hf
from fnmodels.models.common.deepseek_v4.leaves import experts_leaves, near_leaves, wide_norm
from fnmodels.models.common.deepseek_v4.names import stored
from fnmodels.models.common.deepseek_v4.streams import hyper_leaves, tap_mean, with_ends
from fnmodels.models.common.deepseek_v4.windows import attend_to_windows
from fnmodels.models.common.deepseek_v41 import ngrams
from fnmodels.models.common.deepseek_v41.config import (
    NGRAM_FIELDS,
    all_kinds,
    check_lenders,
    layer_kinds_of,
    layer_kinds_to_hf,
    ngrams_of,
    ngrams_to_hf,
    ratio_of,
)
from fnmodels.models.common.deepseek_v41.windows import lent_like, shared_keys, window_leaves  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers.ngrams import has_table, numbered
from fnmodels.models.common.spec import decoder_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, rms_norm_fp32_weight, rotary_table, split_heads
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, clamped_glu
from fnmodels.ops.moe.router import RouterDtypes, sqrt_softplus_top_k
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.ops.streams.ngrams import XorHash
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v41", "deepseek_v41_text")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=all_kinds(),
    routed=True,
    router=ROUTER,
    sinks=True,
    reads_ids=True,
    dropout={},
    left_axis="one",
    left_wide=True,
    of_tokenizer=("ngrams.token_map",),
    # the drafting heads; the tower, and biases of routers that are for tokens of images
    unread={"mtp": r"mtp\..*", "vision": r"(vision|aligner)\..*|image_.*|layers\.\d+\.ffn\.gate\.bias_vl"},
)
_CANDIDATES = {"candidate_topk_blocks": "candidate_blocks", "candidate_block_size": "candidate_size"}
_FIXED = FIXED | {"gate_temp": 1.0, "num_hash_layers": 0}
_OUTER = ("vision_config", "image_token_id")
# of the drafting heads, and what V4 has no use for
_IGNORED: tuple[str, ...] = ("expert_dtype", "n_group", "topk_group", "num_nextn_predict_layers", "n_mtp_layers")
_IGNORED += tuple(f"dspark_{n}" for n in ("block_size", "markov_rank", "n_routed_experts", "noise_token_id"))
_IGNORED += ("dspark_num_experts_per_tok", "dspark_target_layer_ids")


@dataclass(frozen=True, kw_only=True)
class Config(mixture.SharedConfig):
    """Sizes and switches."""

    intermediate_size: int = field(init=False, compare=False)  # moe_intermediate_size: every layer has experts
    num_key_value_heads: int = field(default=1, init=False)
    local_rope: Rope = Rope(partial=0.125)  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-20
    q_lora_rank: int
    o_lora_rank: int  # of each of the groups
    o_groups: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # windows of a query
    candidate_blocks: int = 2048  # of windows, among which later layers choose
    candidate_size: int = 8  # windows of a block
    swiglu_limit: float
    residual_streams: int
    sinkhorn_iterations: int
    hyper_eps: float = 1e-6
    ngram_size: int = 0  # tokens of the longest n-gram; 0: no layer has a table
    ngram_heads: int = 8  # of each order of n-grams
    ngram_head_dim: int = 256  # the width of a table
    ngram_rows: int = 16_000_000  # the least number of rows of a head
    ngram_ids: int = 1  # compressed token ids
    ngram_padding: int = 2  # the token whose compressed id stands for tokens that an n-gram lacks
    ngram_hashes: tuple[XorHash, ...] = field(init=False, compare=False, repr=False)  # of each table

    def __post_init__(self) -> None:
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
        decoder.check_sizes(self, "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "index_topk")
        decoder.check_sizes(self, "residual_streams", "sinkhorn_iterations", "candidate_blocks", "candidate_size")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(f"o_groups {self.o_groups} does not divide num_attention_heads.")
        if self.index_head_dim < (rotary := self.rope.dim(self.head_dim)):
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below the {rotary} dimensions that rotate.")
        check_lenders(self.layer_kinds)
        tables = sum(map(has_table, self.layer_kinds))
        if bool(tables) != bool(self.ngram_size):
            raise ConfigError(
                f"ngram_size is {self.ngram_size}, and {tables} of layer_kinds have tables of n-grams; it is 0 where "
                "none has, and at least 2 elsewhere."
            )
        if tables:
            decoder.check_sizes(self, "ngram_heads", "ngram_head_dim", "ngram_rows", "ngram_ids")
        object.__setattr__(self, "ngram_hashes", ngrams.hashes_of(self) if tables else ())

    @property
    def hyper(self) -> HyperConnection:
        """The settings of its hyper-connections."""
        return HyperConnection(self.sinkhorn_iterations, self.hyper_eps, self.rms_norm_eps)

    @property
    def index_least_keys(self) -> int:
        """The keys of a row in which layers choose: in all rows, with names for no window where there are few."""
        return 1

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type deepseek_v41 only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "deepseek_v41":
            fields = decoder.text_part(fields, "deepseek_v41_text", ignored=_OUTER)
        inner = fields.integer("moe_intermediate_size", 2304)
        fields = Fields({"intermediate_size": inner, "moe_intermediate_size": inner, **fields.values}, fields.where)
        fields.expect("model_type", "deepseek_v41_text")
        fields.expect("intermediate_size", inner)
        fields.expect("num_key_value_heads", 1)
        sizes = decoder.decoder_sizes(fields, max_positions=1048576, tied=False, kv_heads=1, head_dim=512)
        for name in ("intermediate_size", "num_key_value_heads"):
            del sizes[name]
        for name, value in _FIXED.items():
            fields.expect(name, value)
        layers = sizes["num_hidden_layers"]
        layer_kinds = layer_kinds_of(fields, layers)
        ropes = ropes_of(fields, sizes["head_dim"], sizes["max_position_embeddings"])
        candidates: dict[str, Any] = {
            ours: fields.integer(theirs) for theirs, ours in _CANDIDATES.items() if theirs in fields.values
        }
        defaults = SIZES | {"q_lora_rank": 1280, "index_n_heads": 32}
        config = Config(
            **sizes,
            **fields.plain(**defaults, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-20),
            **candidates,
            **ngrams_of(fields, sum(map(has_table, layer_kinds))),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            n_routed_experts=fields.integer("n_routed_experts", 384, high=mixture.experts_limit(layers)),
            rope=ropes["compress"],
            local_rope=ropes["main"],
            residual_streams=fields.integer("hc_mult", 4, low=2),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters", 20, high=1000),
            hyper_eps=fields.number("hc_eps", 1e-6),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=layer_kinds,
            model_type=model_type,
        )
        if config.ngram_size:
            fields.expect("engram_num_embeddings", [sum(how.sizes) for how in config.ngram_hashes])
        return decoder.finished(config, fields, ignored=(*_IGNORED, *NGRAM_FIELDS))

    def to_hf(self) -> ConfigJson:
        """A config.json as published; for model type deepseek_v41 with `text_config` but no tower."""
        if self.model_type == "deepseek_v41":
            text = replace(self, model_type="deepseek_v41_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        own = layer_kinds_to_hf(self) | ngrams_to_hf(self)
        own |= {theirs: getattr(self, ours) for theirs, ours in _CANDIDATES.items()}
        own |= {"rope_parameters": ropes_to_hf(self), "qk_rope_head_dim": self.rope.dim(self.head_dim)}
        own |= {"hc_mult": self.residual_streams, "hc_sinkhorn_iters": self.sinkhorn_iterations}
        own |= {"hc_eps": self.hyper_eps, "moe_intermediate_size": self.moe_intermediate_size}
        names = (*SIZES, "n_routed_experts", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hidden_act")
        made = decoder.decoder_to_hf(self, "DeepseekV41ForCausalLM", *names, **own)
        del made["intermediate_size"]
        return made


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer: with the numbers of tables, the words of both ends, and "joins" for all but the first."""
    return tuple(f"{kind}{'_joins' * (i > 0)}" for i, kind in enumerate(with_ends(numbered(config.layer_kinds))))


def left_shape(config: Config, index: int) -> tuple[int]:
    """(n,): the weights by which the next sublayer reads the streams."""
    return (config.residual_streams,)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    n, norm, tables = config.residual_streams, wide_norm(config.hidden_size, "embed"), itertools.count()
    connection = hyper_leaves(config, (2 + n) * n, 3)

    def layer(kind: LayerKind) -> Tree:
        return {
            **({"ngrams": ngrams.leaves(config, next(tables))} if has_table(kind.name) else {}),
            "attention_hyper": connection,
            "input_layernorm": norm,
            "attention": near_leaves(config) | window_leaves(config, kind),
            "mlp_hyper": connection,
            "post_attention_layernorm": norm,
            "mlp": experts_leaves(config, kind),
        }

    return decoder_leaves(config, [*map(layer, parsed(config.layer_kinds))]) | {"norm": norm}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, which are DeepSeek's own."""
    names = {path: stored(path, config) for path in flatten(spec(config)) if ".ngrams." not in path}
    for index, kind in enumerate(config.layer_kinds):
        if has_table(kind):
            names |= ngrams.names(config, f"layers.{index}.ngrams", f"layers.{index}.engram")
    return names


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, Any]:
    """{kind: the mask of the last tokens; with "windows" beside it where a layer reads keys of windows}."""
    near: MaskLike = build_mask(Causal() & Window(config.sliding_window), positions, segment_ids, create=create)
    made: dict[int, Any] = {0: near}
    for ratio in {*map(ratio_of, config.layer_kinds)} - {0}:
        made[ratio] = {"attention": near, "windows": build_windows(positions, segment_ids, ratio)}
    return {kind: made[ratio_of(kind)] for kind in kinds(config)}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Any]:
    """{kind: its table; of layers with windows {"table", "start": of the first position of each token's window}}."""
    made: dict[int, Any] = {0: rotary_table(config.local_rope, config.head_dim, positions, length)}
    scaled = rotary_table(config.rope, config.head_dim, positions, length)
    for ratio in {*map(ratio_of, config.layer_kinds)} - {0}:
        first = positions - positions % ratio
        made[ratio] = {"table": scaled, "start": rotary_table(config.rope, config.head_dim, first, length)}
    return {kind: made[ratio_of(kind)] for kind in kinds(config)}


def shared(params: Tree, inputs: Tree, /, *, config: Config) -> Tree:
    """{"ids": token ids [B, S], "preceding": [B, S, n - 1]}; {} where no layer embeds n-grams."""
    return dict(zip(("ids", "preceding"), ngram_inputs(inputs), strict=True)) if config.ngram_size else {}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V]."""
    return decoder.project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Any, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it."""
    eps, how, words = config.rms_norm_eps, config.hyper, kind.split("_")
    x = hyper.opened(x, config.residual_streams) if x.ndim == 3 else x
    pre = ctx.left() if "joins" in words else hyper.first_pre(x)
    x = ngrams.add(layer["ngrams"], x, config, kind, ctx) if "ngrams" in layer else x

    def attend(x: Tensor) -> Tensor:
        normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
        return ctx.tap("attention", _attention(layer["attention"], normed, mask, freqs, config, kind, ctx))

    def feed(x: Tensor) -> Tensor:
        normed = rms_norm_fp32_weight(x, layer["post_attention_layernorm"], eps=eps)
        act = functools.partial(clamped_glu, activation=config.hidden_act, limit=config.swiglu_limit)
        bias, scale = layer["mlp"]["selection_bias"], config.routed_scaling_factor
        route = functools.partial(sqrt_softplus_top_k, k=config.num_experts_per_tok, bias=bias, scale=scale)
        return ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=act, dtypes=ROUTER))

    x, pre = hyper.connect_late(layer["attention_hyper"], x, pre, attend, how)
    x, pre = hyper.connect_late(layer["mlp_hyper"], tap_mean(ctx, "middle", x), pre, feed, how)
    x = ctx.tap("streams", x)
    if "folds" in words:
        return hyper.collapse(x, pre)
    ctx.leave(pre)
    return x


def _attention(weights: Tree, x: Tensor, mask: Any, freqs: Any, config: Config, kind: str, ctx: Context) -> Tensor:
    eps, scale = config.rms_norm_eps, config.head_dim**-0.5
    table = freqs["table"] if isinstance(freqs, Mapping) else freqs
    latent = rms_norm_fp32_weight(linear(x, weights["q_a_proj"]), weights["q_a_layernorm"], eps=eps)
    q = rotate(split_heads(linear(latent, weights["q_b_proj"]), config.head_dim), table)
    kv = rms_norm_fp32_weight(linear(x, weights["kv_proj"]), weights["kv_a_layernorm"], eps=eps).unsqueeze(-2)
    kv = rotate(kv, table)
    if isinstance(freqs, Mapping):
        how: dict[str, Any] = {"config": config, "kind": kind, "rotate": rotate}
        windows, choices = shared_keys(ctx, weights, (x, latent), mask, freqs, **how)
        z = attend_to_windows(ctx, q, kv, mask, windows, choices=choices, scale=scale, sinks=weights["sinks"])
    else:
        z = ctx.attend(q, kv, kv, mask, scale=scale, sinks=weights["sinks"])
    return project_heads(weights, rotated_back(z, table), config.o_lora_rank)


PRESETS: dict[str, ConfigJson] = {
    "deepseek-v4.1-flash": {
        "model_type": "deepseek_v41",
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": 129280,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "compress_ratios": [0, 0, *[2] * 18, *[1] * 20],
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "candidate_source_layer_id": 20,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "engram_vocab_size": 16000000,
            "engram_compressed_vocab_size": 99092,
            "engram_pad_token_id": 2,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
        },
    }
}
