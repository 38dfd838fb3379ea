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

The choice of windows has no gradient, so the indexer's parameters are not trained by a loss on logits. MTP parts of the
files are not read.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Causal, Window
from fnmodels.inputs.windows import build_windows
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed  # noqa: F401
from fnmodels.models.common.deepseek_v4.streams import ended, hyper_leaves, tap_mean, through, with_ends
from fnmodels.models.common.deepseek_v4.windows import Compressor, attend_to_windows, choose_windows, window_keys
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf
from fnmodels.models.common.spec import Constant, InTurn, Leaf, Normal, decoder_leaves, moe_leaves, norm, weight
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import Rope, apply_rotary_interleaved, rms_norm, rms_norm_fp32_weight, rotary_table, split_heads
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, clamped_glu
from fnmodels.ops.moe.router import RouterDtypes, sqrt_softplus_top_k
from fnmodels.ops.rotary import Rotation, table_of
from fnmodels.ops.streams import hyper
from fnmodels.ops.streams.hyper import HyperConnection
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v4",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
_ATTENTION = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "indexed",
    "heavily_compressed_attention": "compressed",
}
_MLP = {"hash_moe": "_hash_moe", "moe": "_moe"}
_KINDS = tuple(attention + mlp for mlp in _MLP.values() for attention in ("compressed", "indexed", "sliding"))
TRAITS = Traits(
    kinds=_KINDS,
    routed=True,
    router=ROUTER,
    sinks=True,
    reads_ids=True,
    dropout={},
    unread={"mtp": r"mtp\..*"},
    in_memory={
        r"^embed\.": "model.embed_tokens.",
        r"^head\.": "lm_head.",
        r"^norm\.": "model.norm.",
        r"^hc_head_": "model.hc_head.hc_",
        r"^layers\.": "model.layers.",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.hc_(attn|ffn)_": r".\1_hc.",
        r"\.attn\.indexer\.compressor\.": ".self_attn.compressor.indexer.",
        r"\.attn\.indexer\.wq_b\.": ".self_attn.compressor.indexer.q_b_proj.",
        r"\.attn\.indexer\.weights_proj\.": ".self_attn.compressor.indexer.scorer.weights_proj.",
        r"\.attn\.attn_sink": ".self_attn.sinks",
        r"\.attn\.": ".self_attn.",
        r"\.ffn\.": ".mlp.",
        r"(\.compressor(?:\.indexer)?)\.norm\.": r"\1.kv_norm.",
        r"\.ape$": ".position_bias",
        r"\.wq_a\.": ".q_a_proj.",
        r"\.q_norm\.": ".q_a_norm.",
        r"\.wq_b\.": ".q_b_proj.",
        r"\.wkv\.": ".kv_proj.",
        r"\.wgate\.": ".gate_proj.",
        r"\.wo_(a|b)\.": r".o_\1_proj.",
        r"\.gate\.bias$": ".gate.e_score_correction_bias",
        r"\.w1\.": ".gate_proj.",
        r"\.w2\.": ".down_proj.",
        r"\.w3\.": ".up_proj.",
    },
    resaved={
        r"model\.embed_tokens\.(.*)": r"embed.\1",
        r"model\.norm\.(.*)": r"norm.\1",
        r"model\.hc_head\.hc_(.*)": r"hc_head_\1",
        r"model\.(layers\.\d+\.attn)\.norm\.(.*)": r"\1.kv_norm.\2",
        r"model\.(layers\..*)": r"\1",
    },
)
_INDEXED, _COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)
        super().__post_init__()
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
        for name, value in _FIXED.items():
            fields.expect(name, value)
        layers = sizes["num_hidden_layers"]
        ratios = _ratios(fields)
        ropes = _ropes(fields, sizes["head_dim"], sizes["max_position_embeddings"])
        config = Config(
            **sizes,
            **fields.plain(**_SIZES, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-6),
            moe_intermediate_size=inner,
            n_routed_experts=fields.integer("n_routed_experts", 256, high=mixture.experts_limit(layers)),
            rope=ropes["compress"],
            local_rope=ropes["main"],
            indexed_ratio=ratios[_INDEXED],
            compressed_ratio=ratios[_COMPRESSED],
            residual_streams=fields.integer("hc_mult", 4),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters", 20, high=1000),
            hyper_eps=fields.number("hc_eps", 1e-6),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=_layer_kinds(fields, layers, ratios),
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        ignored = ("num_nextn_predict_layers", "expert_dtype", "ep_size", "n_group", "topk_group")
        return decoder.finished(config, fields, ignored=ignored)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect of transformers."""
        kinds = parsed(self.layer_kinds)
        words = {kind: name for name, kind in _ATTENTION.items()}
        own: ConfigJson = {
            "layer_types": [words[kind.attends] for kind in kinds],
            "mlp_layer_types": ["hash_moe" if "_hash" in kind.name else "moe" for kind in kinds],
            "compress_rates": {_INDEXED: self.indexed_ratio, _COMPRESSED: self.compressed_ratio},
            "rope_parameters": {name: _rope_to_hf(rope) for name, rope in _named(self).items()},
            "qk_rope_head_dim": self.rope.dim(self.head_dim),
            "hc_mult": self.residual_streams,
            "hc_sinkhorn_iters": self.sinkhorn_iterations,
            "hc_eps": self.hyper_eps,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        names = (*_SIZES, "n_routed_experts", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hidden_act")
        made = decoder.decoder_to_hf(self, "DeepseekV4ForCausalLM", *names, **own)
        del made["intermediate_size"]
        return made


# Fields of one value, which files of DeepSeek V3 may have others of, and sizes with Flash's values as defaults.
_FIXED: dict[str, Any] = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "topk_method": "noaux_tc",
    "router_jitter_noise": 0.0,
}
_SIZES = {
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
}


def _named(config: Config) -> dict[str, Rope]:
    return {"main": config.local_rope, "compress": config.rope}


def _rope_to_hf(rope: Rope) -> ConfigJson:
    return rope_to_hf(rope) | {"partial_rotary_factor": rope.partial}


def _ratios(fields: Fields) -> dict[str, int]:
    """{type of layer: tokens of its windows}, from `compress_rates` or a field of each."""
    given = fields.take("compress_rates", None)
    inner = Fields({} if given is None else given, f"{fields.where}, compress_rates")
    found = {name: inner.integer(name, ratio) for name, ratio in ((_INDEXED, 4), (_COMPRESSED, 128))}
    inner.finish()
    for name, older in ((_INDEXED, "compress_rate_csa"), (_COMPRESSED, "compress_rate_hca")):
        found[name] = fields.integer(older, found[name])
    return found


def _layer_kinds(fields: Fields, layers: int, ratios: Mapping[str, int]) -> tuple[str, ...]:
    """The kinds of layers, from `layer_types` or, as published, the tokens of each layer's windows (0: none)."""
    types = ["heavily_compressed_attention" if i < 2 or i % 2 == 0 else _INDEXED for i in range(layers)]
    listed = fields.take("compress_ratios", None)  # of MTP parts too
    if listed is not None:
        known = {0: "sliding_attention", 4: _INDEXED, 128: _COMPRESSED}
        if not isinstance(listed, list) or len(listed) < layers or any(one not in known for one in listed):
            raise ConfigError(
                f"{fields.where}: 'compress_ratios' is {shown(listed)}, but must be a list of 0, 4 or 128 for each of "
                f"{layers} layers."
            )
        types = [known[one] for one in listed[:layers]]
    attention = _per_layer(fields, "layer_types", _ATTENTION, types)
    hashed = fields.integer("num_hash_layers", 3, low=0)
    mlps = _per_layer(fields, "mlp_layer_types", _MLP, ["hash_moe" if i < hashed else "moe" for i in range(layers)])
    return tuple(map("".join, zip(attention, mlps, strict=True)))


def _per_layer(fields: Fields, name: str, known: Mapping[str, str], default: list[str]) -> list[str]:
    """The value in `known` of each layer's entry in the list of field `name`; ConfigError if it is not such a list."""
    given = fields.take(name, default)
    given = default if given is None else given
    if not isinstance(given, list) or len(given) != len(default) or any(one not in list(known) for one in given):
        wanted = f"a list of {len(default)} entries, each {' or '.join(map(repr, known))}"
        raise ConfigError(f"{fields.where}: {name!r} is {shown(given)}, but must be {wanted}.")
    return [known[one] for one in given]


def _ropes(fields: Fields, head_dim: int, max_positions: int) -> dict[str, Rope]:
    """{"main", "compress"}: from `rope_parameters` of both, or from one scaling, which is of compressed layers alone.

    cos and sin are not multiplied by the factor of YaRN.
    """
    rotary = fields.integer("qk_rope_head_dim", int(head_dim * fields.number("partial_rotary_factor", 0.125)))
    if fields.take("partial_rotary_factor", None) is not None:
        fields.expect("partial_rotary_factor", rotary / head_dim)
    thetas = {"main": fields.number("rope_theta", 1e4), "compress": fields.number("compress_rope_theta", 1.6e5)}
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    given = new if new is not None else old if old is not None else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{fields.where}: the rope is {shown(given)}, but must be an object.")
    nested = given if set(given) & set(thetas) else {"main": {}, "compress": given}
    if unknown := sorted(set(nested) - set(thetas)):
        raise ConfigError(f"{fields.where}: 'rope_parameters' has {', '.join(unknown)} beside main and compress.")
    ropes = {}
    for name, theta in thetas.items():
        values = {"partial_rotary_factor": rotary / head_dim, **(nested.get(name) or {})}
        if nested is not given:
            values |= {"rope_theta": theta}
        if "yarn" in (values.get("rope_type"), values.get("type")) and nested is not given:
            values.setdefault("attention_factor", 1.0)
        inner = Fields(values, f"{fields.where}, rope of {name}")
        ropes[name] = parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=theta, partial=0.125)
    return ropes


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer; the first and the last have words of their own, see `deepseek_v4.streams`."""
    return with_ends(config.layer_kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    n, last = config.residual_streams, config.num_hidden_layers - 1
    connection = hyper_leaves(config, (2 + n) * n, 3)

    def layer(index: int, kind: LayerKind) -> Tree:
        return {
            "attention_hyper": connection,
            "input_layernorm": _norm(config.hidden_size, "embed"),
            "attention": _attention_leaves(config, kind),
            "mlp_hyper": connection,
            "post_attention_layernorm": _norm(config.hidden_size, "embed"),
            "mlp": _experts_leaves(config, kind),
            **({"fold": hyper_leaves(config, n, 1)} if index == last else {}),
        }

    leaves = decoder_leaves(config, [layer(i, kind) for i, kind in enumerate(parsed(config.layer_kinds))])
    return leaves | {"norm": _norm(config.hidden_size, "embed")}


def _norm(size: int, axis: str) -> Leaf:
    return replace(norm(size, axis), keep_dtype=True)


def _attention_leaves(config: Config, kind: LayerKind) -> Tree:
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, rank = config.num_attention_heads, config.o_groups * config.o_lora_rank
    leaves: Tree = {
        "q_a_proj": weight((config.q_lora_rank, D), ("latent", "embed"), std),
        "q_a_layernorm": _norm(config.q_lora_rank, "latent"),
        "q_b_proj": weight((heads * H, config.q_lora_rank), ("heads", "latent"), std, unit=H),
        "kv_proj": weight((H, D), ("latent", "embed"), std),
        "kv_a_layernorm": _norm(H, "latent"),
        "sinks": Leaf((heads,), torch.float32, ("heads",), Normal(std), decay=False, keep_dtype=True),
        "o_a": weight((rank, heads * H // config.o_groups), ("head_groups", "latent"), std, unit=config.o_lora_rank),
        "o_b_proj": weight((D, rank), ("embed", "head_groups"), std, unit=config.o_lora_rank),
    }
    if kind.attends == "compressed":
        leaves["compressor"] = _compressor_leaves(config, H, config.compressed_ratio, overlap=False)
    if kind.indexed:
        leaves["compressor"] = _compressor_leaves(config, H, config.indexed_ratio, overlap=True)
        leaves["indexer"] = _indexer_leaves(config)
    return leaves


def _compressor_leaves(config: Config, width: int, ratio: int, *, overlap: bool) -> dict[str, Leaf]:
    D, std, rows = config.hidden_size, config.initializer_range, width * (1 + overlap)
    kept: dict[str, Any] = {"dtype": torch.float32, "decay": False, "keep_dtype": True}
    return {
        "kv_proj": weight((rows, D), ("latent", "embed"), std),
        "gate_proj": weight((rows, D), ("latent", "embed"), std),
        "bias": Leaf((ratio, rows), axes=("one", "latent"), init=Constant(0.0), **kept),
        "key_scale": _norm(width, "latent"),
    }


def _indexer_leaves(config: Config) -> Tree:
    """Parameters of the indexer; every process of tensor parallelism has all heads, to choose alike."""
    width, heads, std = config.index_head_dim, config.index_n_heads, config.initializer_range
    of_keys = _compressor_leaves(config, width, config.indexed_ratio, overlap=True)
    return {
        "q_b_proj": replace(weight((heads * width, config.q_lora_rank), ("latent", "latent"), std), trainable=False),
        "weights_proj": replace(weight((heads, config.hidden_size), ("latent", "embed"), std), trainable=False),
        "compressor": {name: replace(leaf, trainable=False) for name, leaf in of_keys.items()},
    }


def _experts_leaves(config: Config, kind: LayerKind) -> Tree:
    experts, inner, k = config.n_routed_experts, config.moe_intermediate_size, config.num_experts_per_tok
    shared, hashed = config.n_shared_experts * inner, "_hash" in kind.name
    flags: dict[str, Any] = {"std": config.initializer_range, "shared": shared, "selection_bias": not hashed}
    leaves = moe_leaves(config.hidden_size, experts, inner, **flags)
    if hashed:  # numbers of experts, floating so that the tree has gradients
        kept: dict[str, Any] = {"trainable": False, "decay": False, "keep_dtype": True}
        leaves["tid2eid"] = Leaf((config.vocab_size, k), torch.float32, ("router", "one"), InTurn(experts), **kept)
    return leaves


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, which are DeepSeek's own."""
    return {path: _stored(path, config) for path in flatten(spec(config))}


_OUTSIDE = {"embed_tokens": "embed.weight", "lm_head": "head.weight", "norm": "norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "attention.q_a_proj": "attn.wq_a.weight",
    "attention.q_a_layernorm": "attn.q_norm.weight",
    "attention.q_b_proj": "attn.wq_b.weight",
    "attention.kv_proj": "attn.wkv.weight",
    "attention.kv_a_layernorm": "attn.kv_norm.weight",
    "attention.sinks": "attn.attn_sink",
    "attention.o_a": "attn.wo_a.weight",
    "attention.o_b_proj": "attn.wo_b.weight",
    "attention.indexer.q_b_proj": "attn.indexer.wq_b.weight",
    "attention.indexer.weights_proj": "attn.indexer.weights_proj.weight",
    "mlp.router": "ffn.gate.weight",
    "mlp.selection_bias": "ffn.gate.bias",
}
_COMPRESSOR = {"kv_proj": "wkv.weight", "gate_proj": "wgate.weight", "bias": "ape", "key_scale": "norm.weight"}
_EXPERT = {"gate_proj": "w1.weight", "down_proj": "w2.weight", "up_proj": "w3.weight"}


def _stored(path: str, config: Config) -> Stored:
    if path in _OUTSIDE or path == "score":
        return _OUTSIDE.get(path, "score.weight")
    layer, _, inner = path.removeprefix("layers.").partition(".")
    where, last = f"layers.{layer}", path.rpartition(".")[2]
    if inner in _PARTS:
        return f"{where}.{_PARTS[inner]}"
    if ".compressor." in inner:
        of = "attn.indexer.compressor" if ".indexer." in inner else "attn.compressor"
        return f"{where}.{of}.{_COMPRESSOR[last]}"
    if inner.startswith("mlp.experts."):
        return mixture.expert_names(f"{where}.ffn.experts", config.n_routed_experts, _EXPERT[last])
    if inner.startswith("mlp.shared_expert."):
        return f"{where}.ffn.shared_experts.{_EXPERT[last]}"
    if inner == "mlp.tid2eid":
        rows = config.vocab_size
        return TensorSlice(f"{where}.ffn.gate.tid2eid", 0, rows, rows, experts=config.n_routed_experts)
    if inner.startswith("fold."):
        return f"hc_head_{last}"
    return f"{where}.hc_{'attn' if inner.startswith('attention_hyper') else 'ffn'}_{last}"


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, Any]:
    """{kind: the mask of the last tokens; with "windows" beside it where a layer reads keys of windows}."""
    near: MaskLike = build_mask(Causal() & Window(config.sliding_window), positions, segment_ids, create=create)
    found: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for kind in parsed(sorted(set(kinds(config)))):
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
    for kind in parsed(sorted(set(kinds(config)))):
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


def rotate(x: Tensor, table: Tensor | Rotation) -> Tensor:
    """x [B, S, N, H] with pairs (2i, 2i + 1) of its last R dimensions rotated; table [B or 1, S, R/2, 2]."""
    plain = table_of(table)
    still, turned = x.split((x.shape[-1] - 2 * plain.shape[-2], 2 * plain.shape[-2]), -1)
    return torch.cat((still, apply_rotary_interleaved(turned, plain)), -1)


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
        among = None
        if "indexer" in weights:
            indexer, own = Indexer(config.index_topk, rotate), replace(how, name="index")
            among = choose_windows(ctx, weights["indexer"], (x, latent), mask, freqs, indexer=indexer, how=own)
        z = attend_to_windows(ctx, q, kv, mask, windows, among=among, scale=scale, sinks=weights["sinks"])
    cos, sin = table_of(table).unbind(-1)
    back = rotate(z, torch.stack((cos, -sin), -1))  # as the key of a query's position is rotated
    return _project_out(weights, back, config.o_lora_rank)


def _project_out(weights: Tree, z: Tensor, rank: int) -> Tensor:
    """The output of heads z [B, S, N, H], by a projection of rank `rank` within each group of heads: [B, S, D]."""
    groups = weights["o_a"].shape[0] // rank
    grouped = z.unflatten(2, (groups, -1)).flatten(3)
    inner = torch.stack([linear(grouped[:, :, g], w) for g, w in enumerate(weights["o_a"].chunk(groups))], 2)
    return linear(inner.flatten(2), weights["o_b_proj"])


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
