"""Qwen 3.8 Flash Next (qwen4_exp, 2026, 180B-A6B), the text model: four residual streams that are mixed by gates.

Layers of Gated DeltaNet, and one in four with gated attention to blocks of keys that an indexer chooses
(`fnmodels.ops.indexers.pooled`); all have experts with a gated shared one. Each sublayer reads a mixture of the streams
that is normed already, and its output is added to each of them (`fnmodels.ops.streams.gated`). The last layer mixes
them to one, which the head reads without a further norm. The choice of keys has no gradient. Some layers of Gated
DeltaNet add embeddings of hashed n-grams to the streams first (`fnmodels.ops.streams.ngrams`). The MTP head reads the
streams before the last layer mixes them (`fnmodels.mtp`), and its block is a layer with attention: vLLM,
vllm/models/qwen4_exp/nvidia/mtp.py at d4d0f73ef171, and SGLang's qwen4_exp_mtp.py have its names and maths.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed  # noqa: F401
from fnmodels.models.common.decoder.block_choice import choose_blocks
from fnmodels.models.common.deepseek_v4.streams import tap_mean, with_ends
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import delta, gated_attention, ngrams
from fnmodels.models.common.rope_config import rope_to_hf, split_sections
from fnmodels.models.common.spec import Leaf, decoder_leaves, moe_leaves, norm, weight
from fnmodels.models.common.storage import Stored, fuse, renamed
from fnmodels.ops import apply_rotary, rms_norm_zero_centered, rotary_table
from fnmodels.ops.indexers.pooled import PooledIndexer
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.recurrent.gated_norm import norm_then_sigmoid, norm_then_silu
from fnmodels.ops.streams import gated, hyper
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("qwen4_exp_text", "qwen4_exp")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=("linear_moe", "indexed_moe", "linear_moe_ngrams"),
    routed=True,
    router=ROUTER,
    reads_ids=True,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="streams",
    # of the hash, whose numbers the config gives
    leftovers=(r".*\.ple\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))",),
    in_memory={r"\.shard_0\.": "."},
    unread={"vision": r"model\.visual\..*"},
)
_ATTENTION = {"linear_attention": "linear_moe", "full_attention": "indexed_moe", "indexed_attention": "indexed_moe"}
_HYPER = {"scale": "hc_norm", "down_proj": "input_mix_weight_down", "up_proj": "input_mix_weight_up"}
_HYPER |= {"inject": "block_inject_weight"}  # {parameter of a connection: its name on disk}
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
_VISION = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True, kw_only=True)
class Config(ngrams.NgramConfig):
    """Sizes and switches. sigmoid_gate: of Gated DeltaNet's output, whose gate is a silu otherwise."""

    intermediate_size: int = field(init=False, compare=False)  # moe_intermediate_size: every layer has experts
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    sigmoid_gate: bool = False
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    attention_bias: bool = False
    stream_rank: int = 320  # of the gates that mix the streams
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int  # keys in the complete blocks of a query
    indexer_compress_ratio: int  # positions of a block
    mrope_section: tuple[int, ...] = ()  # rotary frequencies of time, height and width, which are one for text
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
        mtp.check_kinds(self, mtp_kinds(self), most=1)
        mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        delta.check_heads(self)
        decoder.check_sizes(self, *_WIDTHS, "stream_rank", "indexer_n_heads", "indexer_head_dim")
        decoder.check_sizes(self, "indexer_budget", "indexer_compress_ratio")
        if self.residual_streams < 2:
            raise ConfigError(f"residual_streams is {self.residual_streams} and must be at least 2.")
        if self.indexer_budget % self.indexer_compress_ratio:
            raise ConfigError(f"indexer_budget {self.indexer_budget} is not a multiple of indexer_compress_ratio.")
        if self.indexer_head_dim < (rotary := self.rope.dim(self.head_dim)):
            raise ConfigError(f"indexer_head_dim {self.indexer_head_dim} is below the {rotary} dimensions that rotate.")

    @property
    def index_topk(self) -> int:
        """Names of blocks in a query's choice, those at both ends of what it sees among them."""
        return self.indexer_budget // self.indexer_compress_ratio + 2

    @property
    def index_block_size(self) -> int:
        """The positions of a block that a choice names."""
        return self.indexer_compress_ratio

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type qwen4_exp only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "qwen4_exp":
            fields = decoder.text_part(fields, "qwen4_exp_text", ignored=_VISION)
        fields, sections, _ = split_sections(Fields({"intermediate_size": 1, **fields.values}, fields.where))
        usual = decoder.base_fields(
            fields, ("qwen4_exp_text",), theta=1e4, partial=1.0, max_positions=32768, kv_heads=2, head_dim=256
        )
        del usual["intermediate_size"]
        layers = usual["num_hidden_layers"]
        experts, chosen = mixture.experts_from_hf(fields, 512, 10, layers)
        tables, of_ngrams = ngrams.fields_from_hf(fields, layers, usual["hidden_size"])
        gate = fields.take("output_gate_type", None)
        gate = usual["hidden_act"] if gate is None else fields.choice("output_gate_type", ("silu", "sigmoid"))
        every = fields.integer("full_attention_interval", 4)
        default = tuple("linear_moe" if (i + 1) % every else "indexed_moe" for i in range(layers))
        if (heads := fields.integer("indexer_kv_heads")) != 1:
            raise UnsupportedError(f"{fields.where}: 'indexer_kv_heads' is {heads}; all heads share one choice, of 1.")
        indexer: dict[str, Any] = {name: fields.integer(name) for name in _INDEXER}
        layer_kinds = decoder.listed_kinds(fields, ("layer_types",), _ATTENTION) or default
        config = Config(
            **indexer,
            **of_ngrams,
            **usual | {"model_type": model_type},
            **delta.sizes_from_hf(fields, 16, 32, 128, 128, 4),
            **fields.plain(moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True),
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
            num_experts=experts,
            num_experts_per_tok=chosen,
            sigmoid_gate=gate == "sigmoid",
            residual_streams=fields.integer("hc_count", 4, low=2),
            stream_rank=fields.integer("hc_lowrank", 320),
            layer_kinds=tuple(f"{kind}_ngrams" if i in tables else kind for i, kind in enumerate(layer_kinds)),
            mrope_section=sections,
            num_nextn_predict_layers=_heads_of(fields, usual["rope"].theta),
        )
        return decoder.finished(config, fields, ignored=_IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for model type qwen4_exp with `text_config` but no tower."""
        if self.model_type == "qwen4_exp":
            text = replace(self, model_type="qwen4_exp_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        linear = [kind.ordered for kind in parsed(self.layer_kinds)]
        own: ConfigJson = {"layer_types": ["linear_attention" if one else "indexed_attention" for one in linear]}
        own |= {"hc_count": self.residual_streams, "hc_lowrank": self.stream_rank, "indexer_kv_heads": 1}
        own |= {"mtp_num_hidden_layers": self.num_nextn_predict_layers}
        own |= {"output_gate_type": "sigmoid" if self.sigmoid_gate else "silu"} | ngrams.fields_to_hf(self)
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}
        sections = {"mrope_section": list(self.mrope_section), "mrope_interleaved": True}
        own["rope_parameters"] = rope | (sections if self.mrope_section else {})
        names = ("rms_norm_eps", "hidden_act", "attention_bias", "norm_topk_prob", *delta.SIZES, *_WIDTHS, *_INDEXER)
        made = decoder.decoder_to_hf(self, "Qwen4ExpForCausalLM", *names, "num_experts", "num_experts_per_tok", **own)
        del made["intermediate_size"]
        return made


_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
# without effect: of n-grams where no layer has tables, and number_of_conv_states of transformers' caches
# of tables in fp8 files: a dtype that their tensors say
_IGNORED = (*ngrams.FIELDS, "mamba_ssm_dtype", "number_of_conv_states", "ple_embedding_dtype")


def _heads_of(fields: Fields, theta: float) -> int:
    """The number of MTP heads, which `mtp` describes in published files; theta: the base of the model's rope."""
    heads = fields.integer("mtp_num_hidden_layers", 0, low=0, high=1)
    fields.expect("mtp_use_dedicated_embeddings", False)
    described = fields.take("mtp", None)
    inner = Fields({} if described is None else described, f"{fields.where}, mtp")
    for name, value in (("num_hidden_layers", heads), ("hybrid", True), ("rope_theta", theta)):
        inner.expect(name, value)
    inner.expect("layer_types", ["full_attention"])
    inner.expect("mtp_use_hidden_state_from_layer", None)
    inner.finish()
    return heads


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, and those with n-grams numbers."""
    return with_ends(ngrams.numbered(config.layer_kinds))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them."""
    D, std = config.hidden_size, config.initializer_range
    fold = _stream_leaves(config)
    width = config.residual_streams * D
    connection = fold | {"inject": weight((config.residual_streams, width), ("one", "streams"), std)}
    shared = config.shared_expert_intermediate_size
    mlp = moe_leaves(D, config.num_experts, config.moe_intermediate_size, std=std, shared=shared)
    mlp |= {"shared_expert_gate": weight((1, D), ("one", "embed"), std)}

    tables = itertools.count()

    def layer(kind: LayerKind, *, folds: bool = False) -> Tree:
        full: Tree = gated_attention.leaves(config) | {"indexer": _indexer_leaves(config)}
        return {
            **({"ngrams": ngrams.leaves(config, next(tables))} if ngrams.has_table(kind.name) else {}),
            "attention_hyper": connection,
            "attention": delta.gated_delta_leaves(config) if kind.ordered else full,
            "mlp_hyper": connection,
            "mlp": mlp,
            **({"fold": fold} if folds else {}),
        }

    *inner, last = parsed(config.layer_kinds)
    leaves = decoder_leaves(config, [*map(layer, inner), layer(last, folds=True)])
    (of_head,) = parsed(mtp_kinds(config))
    norms = {"enorm": norm(D, "embed", 0.0), "hnorm": norm(width, "streams", 0.0)}
    leaves |= mtp.stream_heads(config, layer(of_head, folds=True), norms)
    return {name: leaf for name, leaf in leaves.items() if name != "norm"}


stream_norm = rms_norm_zero_centered


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return ("indexed_moe",)


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count, or that no result of it reads."""
    unread = r"hyper_connection_mixer\.block_inject_weight" if config.num_nextn_predict_layers else ""
    return (rf"mtp\.{unread}.*",)


def _stream_leaves(config: Config) -> dict[str, Leaf]:
    """The norms of the streams, and the two matrices of the gates that mix them."""
    width, rank, std = config.residual_streams * config.hidden_size, config.stream_rank, config.initializer_range
    return {
        "scale": norm(width, "streams", 0.0),
        "down_proj": weight((rank, width), ("streams_latent", "streams"), std),
        "up_proj": weight((width, rank), ("streams", "streams_latent"), std),
    }


def _indexer_leaves(config: Config) -> dict[str, Leaf]:
    """Parameters of `ops.indexers.pooled`; every process of tensor parallelism has all heads, to choose alike."""
    D, width, std = config.hidden_size, config.indexer_head_dim, config.initializer_range
    leaves = {
        "q_proj": weight((config.indexer_n_heads * width, D), ("latent", "embed"), std),
        "k_proj": weight((width, D), ("latent", "embed"), std),
        "q_scale": norm(width, "latent", 0.0),
        "k_scale": norm(width, "latent", 0.0),
    }
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert; slices of fused projections."""
    flat = {path: leaf for path, leaf in flatten(spec(config)).items() if not path.startswith("mtp.")}
    names: dict[str, Stored] = {}
    for path in flat:
        where, _, last = path.rpartition(".")
        if where.endswith((".attention_hyper", ".mlp_hyper", ".fold")):
            there = where.replace("attention_", "attn_").replace("_hyper", "_hyper_connection")
            there = "hyper_connection_mixer" if where.endswith(".fold") else there
            names[path] = f"model.{there}.{_HYPER[last]}.weight"
        elif not where.endswith((".indexer", ".ngrams")):
            names[path] = mixture.moe_name(path, config.num_experts)
    tables = itertools.count()
    for index, kind in enumerate(parsed(config.layer_kinds)):
        at, there = f"layers.{index}.attention", f"model.layers.{index}"
        if ngrams.has_table(kind.name):
            names |= ngrams.names(config, next(tables), f"layers.{index}.ngrams", f"{there}.ple")
        own = {path.rpartition(".")[2]: path for path in flat if path.rpartition(".")[0] == at}
        if kind.ordered:
            names |= delta.gated_delta_names(f"{there}.linear_attn", own, flat, ("qkv", "z", "b", "a"), 1)
            continue
        names |= gated_attention.names(config, f"{there}.self_attn", own)
        rows = {f"{at}.indexer.{n}_proj": flat[f"{at}.indexer.{n}_proj"].shape[0] for n in "qk"}
        names |= fuse(f"{there}.self_attn.indexer.index_qk_proj.weight", rows)
        names |= {f"{at}.indexer.{n}_scale": f"{there}.self_attn.indexer.{n}_layernorm.weight" for n in "qk"}
    if config.model_type == "qwen4_exp":
        names = {path: renamed(name, r"^model\.", "model.language_model.") for path, name in names.items()}
    if not config.num_nextn_predict_layers:
        return names
    block = replace(mtp.blocks(config)[0], model_type="qwen4_exp_text")
    return names | mtp.names_apart(hf_names(block), 1, around=_AROUND_HEAD)


_AROUND_HEAD = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
_AROUND_HEAD |= {"e_proj": "fc_embedding", "h_proj": "fc_hidden"}


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Any]:
    """{kind: mask}: causal; of linear layers `fnmodels.inputs.Segments`."""
    made = decoder.attention_masks(config, positions, segment_ids, **options)
    return {kind: made[_plain(kind)] for kind in kinds(config)}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Any]:
    """{kind: its table; of indexed layers {"table", "start": of the first position of each token's block}}."""
    if positions.ndim == 3:
        raise ValueError(
            f"positions are {list(positions.shape)}, with axes of images; the text of a Qwen 3.8 Flash Next is read "
            "alone, with positions [B, S]."
        )
    tables: dict[str, Any] = decoder.freqs_cis(config, positions, length=length)
    first = positions - positions % config.indexer_compress_ratio
    start = rotary_table(config.rope, config.head_dim, first, length)
    both = {
        name: table if LayerKind.parse(name).ordered else {"table": table, "start": start}
        for name, table in tables.items()
    }
    return {kind: both[_plain(kind)] for kind in kinds(config)}


def _plain(kind: str) -> str:
    """A kind without the words of the ends of the stack and the number of a table."""
    return kind.replace("_opens", "").replace("_folds", "").rstrip("0123456789")


def shared(params: Tree, inputs: Tree, /, *, config: Config) -> Tree:
    """What layers that embed n-grams read of the tokens."""
    return ngrams.ids_of(inputs, config)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The output head: logits [B, S, V]. Its input is normed by the mixture of the streams."""
    return decoder.project(params, x, config)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Any, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: streams [B, S, n, D] -> the same; the first reads [B, S, D], and the last returns it."""
    eps, ordered = config.rms_norm_eps, LayerKind.parse(kind).ordered
    x = hyper.opened(x, config.residual_streams) if x.ndim == 3 else x
    x = ngrams.add(layer["ngrams"], x, mask, config, kind, ctx) if "ngrams" in layer else x

    def through(weights: Tree, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        h = gated.normed(weights, x, eps=eps)
        return gated.written(weights, x, h, sublayer(gated.mixed(weights, h)))

    def attend(x: Tensor) -> Tensor:
        weights = layer["attention"]
        if ordered:
            norm = norm_then_sigmoid if config.sigmoid_gate else norm_then_silu
            return ctx.tap("attention", delta.gated_delta_net(weights, x, mask, config, ctx, eps=eps, gated=norm))
        count, size = config.index_topk - 2, config.indexer_compress_ratio
        indexer, heads = PooledIndexer(count, size, eps, apply_rotary), (1, 1)
        seen = choose_blocks(ctx, weights["indexer"], x, freqs, mask, heads=heads, indexer=indexer)
        return ctx.tap("attention", gated_attention.attend(weights, x, seen, freqs["table"], config, ctx))

    def feed(x: Tensor) -> Tensor:
        route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
        return ctx.tap("mlp", ctx.moe(layer["mlp"], x, route, act=config.hidden_act, dtypes=ROUTER))

    x = tap_mean(ctx, "middle", through(layer["attention_hyper"], x, attend))
    x = ctx.tap("streams", through(layer["mlp_hyper"], x, feed))
    return gated.folded(layer["fold"], x, eps=eps) if "fold" in layer else x
