"""LongCat-Flash (Meituan, arXiv 2509.01322, 560B-A27B): two attentions around a mixture of experts on a shortcut.

A published layer has two sublayers of latent attention and two dense MLPs. Beside the first MLP runs a mixture of
experts, whose output is added after the second one, so that its communication can overlap with what is between. Some of
its experts return their input. Here each half is a layer:

    full_moe      x += attention(norm(x)); n = norm(x); left = experts(n); x += mlp(n)
    full_joins    x += attention(norm(x)); x += mlp(norm(x)) + left

so that `num_hidden_layers` is twice the files' num_layers. The first half's MLP stands in the tree as the shared expert
of its mixture. Queries and the latents of keys are multiplied by the square root of the width over that of the latent.

The files of LongCat-Flash have an MTP head, whose block is one such attention and an MLP: `fnmodels.mtp`.

LongCat-Flash-Lite (longcat_flash_ngram, 69B-A3B) adds embeddings of n-grams, see `fnmodels.ops.embedding`. Whether an
MTP head of it would read them no public source says, and none is read.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import (
    decoder_leaves,
    embedding,
    gated_mlp_leaves,
    latent_attention_leaves,
    layer_leaves,
    moe_leaves,
    weight,
)
from fnmodels.models.common.storage import Stored
from fnmodels.models.common.storage import renamed as renamed_part
from fnmodels.ops import apply_rotary_interleaved, gated_mlp, latent_scale, project_out, rms_norm
from fnmodels.ops.embedding import NgramHash, add_ngrams, ngram_rows
from fnmodels.ops.moe.identities import with_identities
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("longcat_flash", "longcat_flash_ngram")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
_HALVES = ("full_moe", "full_joins")
_HEAD = ("full",)  # the layer that is the block of the MTP head
TRAITS = Traits(
    kinds=(*_HALVES, *_HEAD),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
)
_RENAMED = {
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; num_hidden_layers: halves of the published layers."""

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # the rotary dimensions of a head
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    n_routed_experts: int
    zero_expert_num: int  # experts of the router that return their input, after the others
    num_experts_per_tok: int
    routed_scaling_factor: float = 6.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of the projections that read x, and of o
    max_position_embeddings: int = 131072
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1
    ngram_size: int = 0  # tokens of the longest n-gram that is embedded beside each token; 0: none is
    ngram_heads: int = 1  # tables of each order of n-grams
    ngram_ratio: float = 1.0  # rows of a table over those of the vocabulary
    ngram_end: int | None = None  # the token id that ends a text

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        halves = _HALVES * (self.num_hidden_layers // 2)
        if not self.layer_kinds:
            object.__setattr__(self, "layer_kinds", halves)
        if self.layer_kinds not in (halves, _HEAD):
            raise ConfigError(
                f"layer_kinds is {self.layer_kinds} for num_hidden_layers {self.num_hidden_layers}; each layer has two "
                f"halves, {' and '.join(_HALVES)}."
            )
        super().__post_init__()
        mtp.check_kinds(self, _HEAD, most=0 if self.ngram_size else 1)
        mixture.check_experts(self.n_routed_experts, self.num_experts_per_tok)
        decoder.check_sizes(self, "moe_intermediate_size", *["zero_expert_num"] * bool(self.zero_expert_num))
        if self.ngram_size and (self.ngram_size < 2 or self.hidden_size % ((self.ngram_size - 1) * self.ngram_heads)):
            raise ConfigError(
                f"ngram_size {self.ngram_size} and ngram_heads {self.ngram_heads} make tables whose number must divide "
                f"hidden_size {self.hidden_size}."
            )

    @property
    def ngrams(self) -> NgramHash:
        """The hash that maps n-grams to rows of tables."""
        rows = int(self.ngram_ratio * self.vocab_size)
        return NgramHash(self.ngram_size, self.ngram_heads, rows, self.vocab_size, self.ngram_end)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        layers = fields.integer("num_layers", fields.integer("num_hidden_layers", 56, high=1000) // 2, high=500)
        fields.expect("num_hidden_layers", 2 * layers, 56)  # transformers 4 writes its default beside num_layers
        halves = {"num_hidden_layers": 2 * layers, "num_layers": None, "head_dim": values.get("head_dim", 64)}
        fields = renamed(Fields({**values, **halves}, fields.where), _RENAMED)
        sizes = mla.latent_from_hf(
            fields, max_positions=131072, kv_heads=0, q_rank=1536, nope_dim=128, rope_head=True
        ) | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
        if sizes.pop("rope_interleave") is not True:
            raise ConfigError(f"{fields.where}: 'rope_interleave' must be true in this family.")
        fields.expect("router_bias", False)
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            fields.expect(name, True)
        fields.expect("zero_expert_type", "identity")
        fields.expect("attention_method", "MLA")
        experts: dict[str, Any] = {name: fields.integer(name, default) for name, default in _EXPERTS.items()}
        fields.integer("n_routed_experts", high=mixture.experts_limit(layers))
        rope = rope_from_hf(
            fields, head_dim=sizes["qk_rope_head_dim"], max_positions=sizes["max_position_embeddings"], theta=1e7
        )
        scale = fields.number("routed_scaling_factor", 6.0)
        config = Config(
            **sizes,
            **experts,
            zero_expert_num=fields.integer("zero_expert_num", 256, low=0, high=mixture.experts_limit(layers)),
            routed_scaling_factor=scale,
            rope=rope,
            **_ngrams_or_heads(fields, model_type),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("n_routed_experts", "zero_expert_num", "routed_scaling_factor")
        own = {old: getattr(self, new) for old, new in _RENAMED.items()}
        own |= {"num_layers": self.num_hidden_layers // 2}
        architecture = "LongcatFlashForCausalLM"
        if self.ngram_size:
            architecture = "LongcatFlashNgramForCausalLM"
            own |= {old: getattr(self, new) for old, new in _NGRAMS.items()} | {"eos_token_id": self.ngram_end}
        else:
            own |= {_HEADS: self.num_nextn_predict_layers}
        made = decoder.decoder_to_hf(self, architecture, *mla.NAMES, *names, **own)
        for name in ("num_hidden_layers", "intermediate_size"):
            del made[name]
        return made


_NGRAMS = {
    "emb_neighbor_num": "ngram_size",
    "emb_split_num": "ngram_heads",
    "ngram_vocab_size_ratio": "ngram_ratio",
}
_EXPERTS = {"moe_intermediate_size": 2048, "num_experts_per_tok": 12, "n_routed_experts": 512}


_HEADS = "num_nextn_predict_layers"  # not in published config.json: files have one head


def _ngrams_or_heads(fields: Fields, model_type: str) -> dict[str, Any]:
    """The Config fields of n-grams, or of the MTP head. The id that ends a text is kept for saving as elsewhere."""
    if model_type == "longcat_flash":
        return {_HEADS: fields.integer(_HEADS, 1, low=0, high=1)}
    fields.integer(_HEADS, 0, low=0)  # which are not read
    end = fields.values.get("eos_token_id", 2)
    if not isinstance(end, int) or isinstance(end, bool):
        raise ConfigError(f"{fields.where}: 'eos_token_id' is {shown(end)}; n-grams end at one token id.")
    return {
        "ngram_size": fields.integer("emb_neighbor_num", low=2, high=16),
        "ngram_heads": fields.integer("emb_split_num", high=64),
        "ngram_ratio": fields.number("ngram_vocab_size_ratio"),
        "ngram_end": end,
    }


def kinds(config: Config) -> tuple[str, ...]:
    """One per half of a layer."""
    return config.layer_kinds


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    attention, rows = latent_attention_leaves(config), config.n_routed_experts + config.zero_expert_num
    experts, wide = config.n_routed_experts, {"selection_bias": True, "wide_router": True}
    first = moe_leaves(width, experts, config.moe_intermediate_size, std=std, shared=inner, **wide)
    first["router"] = replace(first["router"], shape=(rows, width))
    first["selection_bias"] = replace(first["selection_bias"], shape=(rows,))
    mlps = (first, gated_mlp_leaves(width, inner, std=std))
    leaves = decoder_leaves(
        config, [layer_leaves(width, attention, mlps[not kind.routed]) for kind in parsed(config.layer_kinds)]
    )
    leaves |= mtp.heads(config, layer_leaves(width, attention, mlps[1]))
    return leaves | (_ngram_leaves(config) if config.ngram_size else {})


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return _HEAD


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"model\.mtp\..*",)


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path} of the copy of the embedding that the MTP head has in files."""
    return {"model.mtp.embed_tokens.weight": "embed_tokens"} if config.num_nextn_predict_layers else {}


def _ngram_leaves(config: Config) -> Tree:
    sizes, std = config.ngrams.sizes, config.initializer_range
    width = config.hidden_size // len(sizes)
    tables = [embedding(rows, width, std, axis="ngram", size_axis="ngram_latent") for rows in sizes]
    projections = [weight((config.hidden_size, width), ("embed", "ngram_latent"), std) for _ in sizes]
    return {"ngrams": {"tables": tables, "projections": projections}}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    found: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        if path.startswith("mtp."):
            continue
        head, _, rest = path.partition("layers.")
        if path.startswith("ngrams."):
            part = path.removeprefix("ngrams.").replace("tables", "embedders").replace("projections", "post_projs")
            found[path] = f"model.ngram_embeddings.{part}.weight"
            continue
        if head or not rest:
            found[path] = decoder.decoder_name(path)
            continue
        number, _, name = rest.partition(".")
        layer, half = divmod(int(number), 2)
        found[path] = _stored(f"layers.{layer}", str(half), name, config.n_routed_experts)
    return mla.latent_names(found) | _head_names(config)


def _head_names(config: Config) -> dict[str, Stored]:
    """Those of the MTP head."""
    if not config.num_nextn_predict_layers:
        return {}
    # vLLM, vllm/model_executor/models/longcat_flash_mtp.py at 0bb55d60cb66: these names, and the maths
    paths = [path for path in flatten(spec(mtp.blocks(config)[0])) if path.startswith("layers.")]
    block_names = mla.latent_names({path: decoder.decoder_name(path) for path in paths})
    block_names = {p: renamed_part(name, r"\.mlp\.", ".transformer_layer.mlp.") for p, name in block_names.items()}
    around = {"enorm": "enorm.m", "hnorm": "hnorm.m"}
    return mtp.names_of(config, block_names, "model.mtp.layers.{}.", around=around) | {
        "mtp.0.norm": "model.mtp.norm.weight"
    }


def _stored(layer: str, half: str, name: str, experts: int) -> Stored:
    """The name on disk of the parameter `name` of a half of a layer."""
    first, _, rest = name.partition(".")
    if first == "attention":
        return decoder.decoder_name(f"{layer}.{name}").replace("self_attn", f"self_attn.{half}")
    if first != "mlp":
        return f"model.{layer}.{first}.{half}.weight"
    own = {"router": "router.classifier.weight", "selection_bias": "router.e_score_correction_bias"}
    if rest in own:
        return f"model.{layer}.mlp.{own[rest]}"
    if rest.startswith("experts."):
        return mixture.expert_names(f"model.{layer}.mlp.experts", experts, f"{rest.partition('.')[2]}.weight")
    return f"model.{layer}.mlps.{half}.{rest.removeprefix('shared_expert.')}.weight"


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """Token embeddings [B, S, D] with those of n-grams; inputs that are embeddings already are returned unchanged.

    ValueError for ids without the tokens before them, inputs["preceding"] of `fnmodels.prepare`.
    """
    x = decoder.embed(params, inputs, config=config)
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    if not config.ngram_size or tokens.is_floating_point():
        return x
    rows = ngram_rows(*decoder.ngram_inputs(inputs), config.ngrams)
    return add_ngrams(x, params["ngrams"]["tables"], params["ngrams"]["projections"], rows)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One half of a layer: x [B, S, D] -> x."""
    eps = config.rms_norm_eps
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    x = ctx.tap("middle", x + ctx.tap("attention", _attend(layer["attention"], normed, mask, freqs, config, ctx)))
    normed, mlp = rms_norm(x, layer["post_attention_layernorm"], eps=eps), layer["mlp"]
    if not LayerKind.parse(kind).routed:
        x = x + ctx.tap("mlp", gated_mlp(mlp, normed, activation=config.hidden_act, tap=ctx.tap))
        return x + ctx.tap("shortcut", ctx.left()) if LayerKind.parse(kind).joins else x  # else of an MTP head
    x = x + ctx.tap("mlp", gated_mlp(mlp["shared_expert"], normed, activation=config.hidden_act))
    ctx.leave(_experts(mlp, normed, config, ctx))
    return x


def _attend(weights: Mapping[str, Tensor], x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    widths = mla.latent_widths(config)._replace(latent_factor=(config.hidden_size / config.kv_lora_rank) ** 0.5)
    scale = latent_scale(config.rope, widths.nope + widths.rope) * (config.hidden_size / config.q_lora_rank) ** 0.5
    mixed = ctx.attend_latent(weights, x, freqs, mask, widths=widths, rotate=apply_rotary_interleaved, scale=scale)
    return project_out(weights, mixed)


def _experts(mlp: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    """The output [B, S, D] of the experts, which is left for the other half of the layer."""
    k, scale = config.num_experts_per_tok, config.routed_scaling_factor
    route = functools.partial(softmax_top_k, k=k, bias=mlp["selection_bias"], scale=scale)
    routed = {name: leaf for name, leaf in mlp.items() if name != "shared_expert"}
    # a view, so that gradients of router and experts are added first, as where padding is cleared: the same bits
    x = x.view_as(x)
    real = len(mlp["router"]) - config.zero_expert_num
    around = functools.partial(with_identities, count=real) if config.zero_expert_num else None
    return ctx.moe(routed, x, route, act=config.hidden_act, dtypes=ROUTER, around=around)


PRESETS: dict[str, ConfigJson] = {
    "longcat-flash": {"model_type": "longcat_flash", "vocab_size": 131072, "hidden_size": 6144}
    | {"ffn_hidden_size": 12288, "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512}
    | {"q_lora_rank": 1536, "v_head_dim": 128, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512}
    | {"zero_expert_num": 256, "moe_topk": 12, "routed_scaling_factor": 6.0, "rope_theta": 1e7}
    | {"max_position_embeddings": 131072},
    "longcat-flash-lite": {"model_type": "longcat_flash_ngram", "vocab_size": 131072, "hidden_size": 3072}
    | {"ffn_hidden_size": 6144, "num_layers": 14, "num_attention_heads": 32, "kv_lora_rank": 512}
    | {"q_lora_rank": 1536, "v_head_dim": 128, "expert_ffn_hidden_size": 1024, "n_routed_experts": 256}
    | {"zero_expert_num": 128, "moe_topk": 12, "routed_scaling_factor": 6.0, "rope_theta": 5e6}
    | {"max_position_embeddings": 327680, "emb_neighbor_num": 4, "emb_split_num": 4, "ngram_vocab_size_ratio": 78}
    | {"eos_token_id": 2},
}
