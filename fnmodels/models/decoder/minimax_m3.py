"""MiniMax M3, the text model (MiniMax AI, 2026, 428B-A23B): attention to blocks of keys that each key head chooses.

A pre-norm decoder with grouped-query attention, norms that multiply by 1 + weight, queries and keys normed by head, and
rotary embedding of the first part of each head. In all but the first layers an indexer chooses blocks of keys for each
head of keys (`fnmodels.ops.indexers.blocks`), and the MLP is a mixture of experts with a shared one. All MLPs have the
clamped SwiGLU of gpt-oss. The choice has no gradient, so the indexer's parameters are not trained by a loss on logits.

The published files are those of a model with images, of which the text is read. They have one MTP head: `fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, merged, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.decoder.block_choice import choose_blocks
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf
from fnmodels.models.common.spec import (
    Leaf,
    decoder_leaves,
    gated_mlp_leaves,
    head_norms,
    layer_leaves,
    moe_leaves,
    norm,
    usual_attention,
    weight,
)
from fnmodels.models.common.storage import Stored, fuse, renamed
from fnmodels.ops import Rope, apply_rotary, project_out, project_qkv
from fnmodels.ops.indexers.blocks import BlockIndexer
from fnmodels.ops.mlp import acting_mlp, clamped_swiglu
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("minimax_m3_vl_text", "minimax_m3_vl")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full_moe", "indexed_moe", "full", "indexed"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="raw",
    unread={"vision": r"(vision_tower|multi_modal_projector|patch_merge_mlp)\..*"},
)

_ATTENTION = {"full_attention": "full", "minimax_m3_sparse": "indexed"}
_INDEXER = {  # {name in the published sparse_attention_config: that of transformers}
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
# Fields of the published files that transformers ignores, with the values that mean this model.
_EXPECTED = {"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "attention_output_gate": False}
_EXPECTED |= {"use_routing_bias": True, "scoring_func": "sigmoid", "n_shared_experts": 1, "router_jitter_noise": 0.0}
_EXPECTED |= {"swiglu_beta": 1.0}
_SAVED = (
    *("rms_norm_eps", "num_local_experts", "num_experts_per_tok", "routed_scaling_factor", "swiglu_alpha"),
    *("swiglu_limit", "dense_intermediate_size", "shared_intermediate_size", "index_head_dim", "index_block_size"),
    *("index_topk_blocks", "index_local_blocks", "num_nextn_predict_layers"),
)
_IMAGES = (  # fields of the wrapper that the text does not read
    *("vision_config", "merged_hidden_size", "image_token_index", "video_token_index", "image_token_id"),
    *("video_token_id", "projector_hidden_size", "projector_hidden_act", "multimodal_projector_bias"),
    *("image_seq_length", "image_grid_pinpoints", "img_token_compression_config", "image_token_compression_method"),
    *("process_image_mode", "vision_feature_layer", "vision_feature_select_strategy", "num_reserved_tokens"),
)
_HEAD = ("indexed_moe",)  # the layer that is the block of the MTP head


@dataclass(frozen=True, kw_only=True)
class Config(decoder.SizesConfig):
    """Sizes and switches; intermediate_size is that of one expert, and the index_ fields are of indexed layers."""

    dense_intermediate_size: int
    shared_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float = 2.0
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_local_blocks: int = 1
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rope: Rope = Rope(5e6, partial=0.5)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 524288
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, _HEAD, most=1)
        mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)
        decoder.check_sizes(self, "dense_intermediate_size", "shared_intermediate_size", "index_block_size")
        decoder.check_sizes(self, "index_head_dim", "index_topk_blocks", "index_local_blocks")
        if self.index_local_blocks > self.index_topk_blocks:
            raise ConfigError(f"index_local_blocks {self.index_local_blocks} is above index_topk_blocks.")
        if self.index_head_dim < (rotary := self.rope.dim(self.head_dim)):
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below the {rotary} dimensions that rotate.")

    @property
    def index_topk(self) -> int:
        """Names of blocks in a query's choice: those of every head of keys."""
        return self.num_key_value_heads * self.index_topk_blocks

    @property
    def choice_heads(self) -> int:
        """The heads of keys, each of which chooses blocks for the queries that read it."""
        return self.num_key_value_heads

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type minimax_m3_vl only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "minimax_m3_vl":
            fields = decoder.text_part(fields, "minimax_m3_vl_text", ignored=_IMAGES)
        fields = _flat(fields)
        for name, value in _EXPECTED.items():
            fields.expect(name, value)
        fields.expect("hidden_act", "silu")  # without effect: all MLPs use the clamped SwiGLU
        sizes: dict[str, Any] = {"max_positions": 524288, "kv_heads": 4, "head_dim": 128}
        usual = decoder.base_fields(fields, ("minimax_m3_vl_text",), theta=5e6, partial=1.0, **sizes)
        del usual["hidden_act"]
        layers, rope, kv_heads = usual["num_hidden_layers"], usual["rope"], usual["num_key_value_heads"]
        fields.expect("rotary_dim", rope.dim(usual["head_dim"]), 64)  # which transformers writes whatever the rope
        attention = _attention(fields, layers)
        if (index_heads := fields.integer("index_n_heads", 4)) != kv_heads and "indexed" in attention:
            raise UnsupportedError(
                f"{fields.where}: 'index_n_heads' is {index_heads}; it must be {kv_heads}, 'num_key_value_heads', "
                "since each head of keys has a choice of its own."
            )
        experts, chosen = mixture.experts_from_hf(fields, 128, 4, layers)
        config = Config(
            **usual | {"model_type": model_type},
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            **fields.plain(dense_intermediate_size=12288, shared_intermediate_size=3072, index_head_dim=128),
            **fields.plain(index_block_size=128, index_topk_blocks=16, index_local_blocks=1, rms_norm_eps=1e-6),
            **fields.plain(routed_scaling_factor=2.0, swiglu_alpha=1.702, swiglu_limit=7.0),
            layer_kinds=tuple(map("".join, zip(attention, _mlps(fields, layers), strict=True))),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=1),
        )
        return decoder.finished(config, fields, ("num_mtp_modules",))  # how often other code runs the MTP head

    def to_hf(self) -> ConfigJson:
        """A config.json of transformers' form; for model type minimax_m3_vl with `text_config` but no tower."""
        if self.model_type == "minimax_m3_vl":
            text = replace(self, model_type="minimax_m3_vl_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
            outer |= {"model_type": "minimax_m3_vl", "tie_word_embeddings": self.tie_word_embeddings}
            return decoder.expressible(self, outer | {"text_config": text.to_hf()})
        words = {kind: name for name, kind in _ATTENTION.items()}
        layers = parsed(self.layer_kinds)
        own: ConfigJson = {
            "layer_types": [words[kind.attends] for kind in layers],
            "mlp_layer_types": mixture.mlp_types(layers),
            "index_n_heads": self.num_key_value_heads,
            "rotary_dim": self.rope.dim(self.head_dim),
            "rope_parameters": rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial},
            "hidden_act": "silu",
        }
        return decoder.decoder_to_hf(self, "MiniMaxM3VLForCausalLM", *_SAVED, **own)


def _flat(fields: Fields) -> Fields:
    """The fields with those of the published `sparse_attention_config` under the names of transformers."""
    values = {name: value for name, value in fields.values.items() if name != "sparse_attention_config"}
    own = fields.values.get("sparse_attention_config")
    inner = Fields({} if own is None else own, f"{fields.where}, sparse_attention_config")
    inner.expect("use_sparse_attention", True)
    inner.expect("sparse_score_type", "max")
    inner.expect("sparse_init_block", 0)
    given = [(published, name, inner.take(published, None)) for published, name in _INDEXER.items()]
    freq = inner.take("sparse_attention_freq", None)
    inner.expect("sparse_disable_index_value", freq)  # layers whose index values are read are not known
    inner.finish()
    types = None if freq is None else [list(_ATTENTION)[flag] for flag in _flags(inner, "sparse_attention_freq", freq)]
    moe = fields.values.get("moe_layer_freq")
    mlps = None if moe is None else [("dense", "sparse")[flag] for flag in _flags(fields, "moe_layer_freq", moe)]
    values.pop("moe_layer_freq", None)
    if values.get("hidden_act") == "swigluoai":  # as published; transformers replaces it too
        values["hidden_act"] = "silu"
    more = [("sparse_attention_freq", "layer_types", types), ("moe_layer_freq", "mlp_layer_types", mlps)]
    return merged(Fields(values, fields.where), [*given, *more])


def _flags(fields: Fields, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(flag) is not int or flag not in (0, 1) for flag in value):
        raise ConfigError(
            f"{fields.where}: {name!r} is {shown(value)}, but must be a list of 0 and 1, one for a layer."
        )
    return value


def _attention(fields: Fields, layers: int) -> tuple[str, ...]:
    listed = decoder.listed_kinds(fields, ("layer_types",), _ATTENTION) or ("full",) * layers
    if len(listed) != layers:
        raise ConfigError(f"{fields.where}: 'layer_types' names {len(listed)} layers, and there are {layers}.")
    return listed


def _mlps(fields: Fields, layers: int) -> list[str]:
    dense = decoder.sliding_layers(fields, [False] * layers, "dense", "sparse", name="mlp_layer_types")
    return ["" if one else "_moe" for one in dense]


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them."""

    def layer(kind: LayerKind) -> Tree:
        attention: Tree = usual_attention(config) | head_norms(config, 0.0)
        if kind.indexed:
            attention["indexer"] = _indexer_leaves(config)
        return layer_leaves(config.hidden_size, attention, _mlp_leaves(config, kind), norm_value=0.0)

    leaves = decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)], norm_value=0.0)
    (head,) = parsed(_HEAD)
    return leaves | mtp.heads(config, layer(head), norm_value=0.0)


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return _HEAD


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"(language_model\.)?(model\.)?mtp\..*",)


stream_norm = rms_norm_zero_centered


def _indexer_leaves(config: Config) -> Tree:
    """Parameters of `ops.indexers.blocks`; a process of tensor parallelism chooses for its own heads of keys."""
    width, D, std = config.index_head_dim, config.hidden_size, config.initializer_range
    rows = config.num_key_value_heads * width
    leaves = {
        "q_proj": weight((rows, D), ("kv_heads", "embed"), std, unit=width),
        "k_proj": weight((width, D), ("latent", "embed"), std),
        "q_norm": norm(width, "latent", 0.0),
        "k_norm": norm(width, "latent", 0.0),
    }
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


def _mlp_leaves(config: Config, kind: LayerKind) -> Tree:
    D, std = config.hidden_size, config.initializer_range
    if not kind.routed:
        return gated_mlp_leaves(D, config.dense_intermediate_size, std=std)
    more: dict[str, Any] = {"std": std, "shared": config.shared_intermediate_size, "selection_bias": True}
    return moe_leaves(D, config.num_local_experts, config.intermediate_size, **more)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}: the published ones, or of the text alone those that transformers has."""
    flat, model = {path: leaf for path, leaf in flatten(spec(config)).items() if not path.startswith("mtp.")}, "model"
    if config.model_type == "minimax_m3_vl_text":
        names = _names_of_text(config, flat)
    else:
        names, model = mixture.block_sparse_names(flat, config.num_local_experts), "language_model.model"
        for path, name in names.items():
            if isinstance(name, str) and ".indexer." in name:
                names[path] = name.replace(".indexer.", ".index_")
            elif isinstance(name, str) and ".shared_expert." in name:
                names[path] = name.replace(".mlp.shared_expert.", ".block_sparse_moe.shared_experts.")
        names = {path: renamed(name, "^", "language_model.") for path, name in names.items()}
    if not config.num_nextn_predict_layers:
        return names
    # rtp-llm, rtp_llm/models/minimax_m3_mtp.py at 46a35962751b: these names, one head, which reads states before the
    # final norm; the maths is that of vLLM's MiniMaxM3MultiTokenPredictorLayer.
    heads = mtp.names_of(config, hf_names(mtp.blocks(config)[0]), f"{model}.mtp.layers.{{}}.")
    inner = r"\.mtp\.layers\.0\.", ".mtp.layers.0.transformer_layer."
    return names | {path: renamed(name, *inner) if ".block." in path else name for path, name in heads.items()}


def _names_of_text(config: Config, flat: dict[str, Leaf]) -> dict[str, Stored]:
    names: dict[str, Stored] = {
        p: n.replace(".shared_expert.", ".shared_experts.") for p, n in decoder.hf_names(config).items() if p in flat
    }
    for index, kind in enumerate(parsed(config.layer_kinds)):
        where, mlp = f"layers.{index}.mlp", f"layers.{index}.mlp"
        if kind.routed:
            gate = f"model.{where}.gate"
            names |= {f"{where}.router": f"{gate}.weight", f"{where}.selection_bias": f"{gate}.e_score_correction_bias"}
            names |= mixture.stacked_experts(f"{where}.experts", config.intermediate_size)
            mlp = f"{where}.shared_expert"
        rows = {f"{mlp}.{leaf}_proj": flat[f"{mlp}.{leaf}_proj"].shape[0] for leaf in ("gate", "up")}
        names |= fuse(f"model.{mlp.replace('expert', 'experts')}.gate_up_proj.weight", rows)
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q = apply_rotary(rms_norm_zero_centered(q, weights["q_norm"], eps=eps), freqs)
    k = apply_rotary(rms_norm_zero_centered(k, weights["k_norm"], eps=eps), freqs)
    if "indexer" in weights:
        count, local, size = config.index_topk_blocks, config.index_local_blocks, config.index_block_size
        indexer = BlockIndexer(count, local, size, eps, apply_rotary)
        mask = choose_blocks(
            ctx, weights["indexer"], normed, freqs, mask, heads=(q.shape[2], k.shape[2]), indexer=indexer
        )
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm_zero_centered(x, layer["post_attention_layernorm"], eps=eps)
    act = functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", acting_mlp(mlp, normed, act=act, tap=ctx.tap))
    choice = {"k": config.num_experts_per_tok, "bias": mlp["selection_bias"], "scale": config.routed_scaling_factor}
    route = functools.partial(sigmoid_top_k, renormalize=True, **choice)
    return x + ctx.tap("mlp", ctx.moe(mlp, normed, route, act=act, dtypes=ROUTER))


_DENSE = [0, 0, 0, *[1] * 57]
PRESETS: dict[str, ConfigJson] = {
    "minimax-m3": {"model_type": "minimax_m3_vl_text", "vocab_size": 200064, "hidden_size": 6144}
    | {"intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64, "partial_rotary_factor": 0.5}
    | {"max_position_embeddings": 1048576, "moe_layer_freq": _DENSE}
    | {"sparse_attention_config": {"sparse_attention_freq": _DENSE}},
}
