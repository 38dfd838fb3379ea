"""Step 3.5 Flash (StepFun, 2026, 196B-A11B): sliding layers with more heads, gates of heads, and experts with limits.

A pre-norm decoder with grouped-query attention, norms that multiply by 1 + weight, queries and keys normed by head, and
a gate for each head. Sliding layers have a number of query heads and a rotary table of their own. All but the first
layers have experts, chosen by sigmoid scores and a selection bias without a gradient, and a shared one. The activation
of some layers has limits, other ones in experts than in shared experts and dense MLPs.

The text of Step 3.7 Flash is the same, read from its files with part="text". MTP heads are sliding layers with an MLP
without limits, and each has an output head of its own: `fnmodels.mtp`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import decoder, mtp, storage
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, renamed, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import (
    attention_leaves,
    decoder_leaves,
    head_norms,
    layer_leaves,
    moe_leaves,
    usual_mlp,
    weight,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, project_out, project_qkv, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import acting_mlp, glu, limited_glu
from fnmodels.ops.moe.experts_loop import Act
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("step3p5",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
_FORMS = 4  # pairs of limits that a model may have; the published one has two
_PLAIN = ("full_moe", "full", "sliding_moe", "sliding")
TRAITS = Traits(
    kinds=(*_PLAIN, *(f"{kind}_{form}" for kind in _PLAIN for form in range(_FORMS))),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="raw",
    in_memory={
        r"\.moe\.router_bias$": ".mlp.gate.e_score_correction_bias",
        r"\.moe\.": ".mlp.",
        r"\.share_expert\.": ".mlp.shared_experts.",
    },
)

_HEAD = ("sliding",)  # the layer that is an MTP head's block
_FULL, _NEAR = "full_attention", "sliding_attention"
_NAMES = {  # {name in the published files: that of transformers}
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_ROPES = ("rope_theta", "partial_rotary_factors")
# Fields with an entry for each layer, and one for each MTP layer after them.
_LISTS = ("layer_types", "mlp_layer_types", *_ROPES, *_LIMITS)
_ON_DISK = (
    *((r"\.mlp\.selection_proj\.bias", ".moe.router_bias"), (r"\.mlp\.router\.", ".moe.gate.")),
    *((r"\.mlp\.experts\.", ".moe."), (r"\.mlp\.shared_expert\.", ".share_expert."), (r"attn\.gate_", "attn.g_")),
)
# Fields of the published files that transformers ignores, with the values that mean this model.
_EXPECTED: dict[str, Any] = {"use_qk_norm": True, "use_moe": True, "norm_expert_weight": True, "zero_centered": True}
_EXPECTED |= {"moe_router_activation": "sigmoid", "att_impl_type": "GQA", "use_head_wise_attn_gate": True}
_EXPECTED |= {"use_moe_router_bias": True, "sink": False, "use_rope_layers": [], "yarn_only_types": [_FULL]}
_EXPECTED |= {"hidden_act": "silu", "mlp_bias": False, "gating": True, "use_bidirectional_attention": False}
_IGNORED = (  # the publisher computes the router in fp32 (need_fp32_gate), transformers in the dtype of its weight
    *("need_fp32_gate", "moe_layer_offset", "moe_every_n_layer"),
    *("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),  # read by `_expect_heads`
)
_SAVED = (
    *("num_experts_per_tok", "n_routed_experts", "moe_intermediate_size", "share_expert_dim"),
    *("moe_router_scaling_factor", "rms_norm_eps", "attention_bias", "query_pre_attn_scalar", "hidden_act"),
    *("sliding_window", "num_nextn_predict_layers"),
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers, num_attention_heads that of full layers.

    limits: of the activation of experts, and of that of shared experts and dense MLPs, 0 for none; layers whose kind
    ends in the number n have those of limits[n].
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    share_expert_dim: int
    sliding_attention_heads: int = 0  # 0: as many as full layers
    moe_router_scaling_factor: float = 1.0
    limits: tuple[tuple[float, float], ...] = ()
    query_pre_attn_scalar: float = 0.0  # scores are divided by its root; 0: head_dim
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 128000
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.n_routed_experts, self.num_experts_per_tok)
        decoder.check_sizes(self, "moe_intermediate_size", "share_expert_dim")
        near = self.sliding_attention_heads or self.num_attention_heads
        object.__setattr__(self, "sliding_attention_heads", near)
        if near % self.num_key_value_heads:
            raise ConfigError(
                f"sliding_attention_heads {near} is not a multiple of num_key_value_heads {self.num_key_value_heads}."
            )
        object.__setattr__(self, "query_pre_attn_scalar", float(self.query_pre_attn_scalar or self.head_dim))
        self._order_limits()
        slides = {kind.slides for kind in parsed(self.layer_kinds)}
        for name, near in (("rope", False), ("local_rope", True)):  # of no layer, it is none
            if near not in slides:
                object.__setattr__(self, name, Rope())
        mtp.check_kinds(self, _HEAD)

    def _order_limits(self) -> None:
        """Checks `limits`, and puts them in the order of their first layers, so that one model is one Config."""
        pairs, split = self.limits, [_split(kind) for kind in self.layer_kinds]
        if not all(len(pair) == 2 and any(pair) and all(0 <= one < float("inf") for one in pair) for pair in pairs):
            raise ConfigError(f"limits are {pairs}; each must be two numbers of at least 0, one of them above 0.")
        used = [form for form in dict.fromkeys(form for _, form in split) if form is not None]
        if any(form >= len(pairs) for form in used):
            raise ConfigError(f"layer_kinds {self.layer_kinds} name more limits than the {len(pairs)} in limits.")
        object.__setattr__(self, "limits", tuple((float(pairs[form][0]), float(pairs[form][1])) for form in used))
        ordered = tuple(plain + ("" if form is None else f"_{used.index(form)}") for plain, form in split)
        object.__setattr__(self, "layer_kinds", ordered)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), _NAMES)
        heads = fields.integer("num_nextn_predict_layers", 0, low=0, high=mixture.HEADS_LIMIT)
        fields = _published(fields, heads)
        model_type = fields.choice("model_type", MODEL_TYPES)
        for name, value in _EXPECTED.items():
            fields.expect(name, value)
        sizes = decoder.decoder_sizes(fields, max_positions=128000, tied=False, kv_heads=8, head_dim=128)
        layers = sizes["num_hidden_layers"]
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        thetas = dict.fromkeys((_FULL, _NEAR), 1e4)
        ropes = ropes_by_layer_type(fields, thetas, scaled=_FULL, partials=dict.fromkeys(thetas, 1.0), **where)
        slides = decoder.sliding_layers(fields, [False] * layers)
        dense = [index < 3 for index in range(layers)]
        dense = decoder.sliding_layers(fields, dense, "dense", "sparse", name="mlp_layer_types")
        experts, chosen = mixture.experts_from_hf(fields, 288, 8, layers)
        by_layer = list(zip(*(_limits(fields, name, layers) for name in _LIMITS), strict=True))
        pairs = list(dict.fromkeys(pair for pair in by_layer if any(pair)))
        if len(pairs) > _FORMS:
            raise UnsupportedError(
                f"{fields.where}: {' and '.join(map(repr, _LIMITS))} have {len(pairs)} different pairs; at "
                f"most {_FORMS} are supported."
            )
        config = Config(
            **sizes,
            n_routed_experts=experts,
            num_experts_per_tok=chosen,
            **fields.plain(moe_intermediate_size=1280, share_expert_dim=1280, moe_router_scaling_factor=1.0),
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False),
            sliding_attention_heads=_sliding_heads(fields, sizes, slides),
            limits=tuple(pairs),
            query_pre_attn_scalar=fields.number("query_pre_attn_scalar", float(sizes["head_dim"])),
            rope=ropes[_FULL],
            local_rope=ropes[_NEAR],
            sliding_window=fields.integer("sliding_window", 0, low=0) or None,
            layer_kinds=tuple(
                ("sliding" if near else "full") + "_moe" * (not mlp) + (f"_{pairs.index(pair)}" if any(pair) else "")
                for near, mlp, pair in zip(slides, dense, by_layer, strict=True)
            ),
            num_nextn_predict_layers=heads,
            model_type=model_type,
        )
        return decoder.finished(config, fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect of transformers."""
        found = parsed(self.layer_kinds)
        own: ConfigJson = {
            "layer_types": decoder.layer_types([kind.slides for kind in found]),
            "mlp_layer_types": mixture.mlp_types(found),
            "num_sliding_attention_heads": self.sliding_attention_heads,
            "rope_parameters": {_FULL: rope_to_hf(self.rope), _NEAR: rope_to_hf(self.local_rope)},
        }
        forms = [_split(kind)[1] for kind in self.layer_kinds]
        for index, name in enumerate(_LIMITS):
            limits = [0.0 if form is None else self.limits[form][index] for form in forms]
            own[name] = limits if any(limits) else None
        return decoder.decoder_to_hf(self, "Step3p5ForCausalLM", *_SAVED, **own)


def _published(fields: Fields, heads: int) -> Fields:
    """The fields with those of the published files in the form of transformers, without entries of MTP layers."""
    layers = fields.integer("num_hidden_layers", high=LAYERS_LIMIT)
    every = layers + heads
    _expect_heads(fields, layers, heads)
    values = {
        name: value[:layers] if name in _LISTS and isinstance(value, list) and len(value) == every else value
        for name, value in fields.values.items()
    }
    named = values.pop("moe_layers_enum", None)
    if named is not None and values.get("mlp_layer_types") is None:  # transformers reads it in this case alone
        texts = named.split(",") if isinstance(named, str) else named
        if isinstance(texts, list):
            texts = [int(one) if str(one).strip().isdecimal() else one for one in texts if one != ""]
        routed = mixture.numbers_of_layers(fields, "moe_layers_enum", texts, layers)
        values["mlp_layer_types"] = ["sparse" if index in routed else "dense" for index in range(layers)]
    slides = decoder.sliding_layers(Fields(values, fields.where), [False] * layers)
    nested, types = values.get("rope_parameters"), decoder.layer_types(slides)
    if nested is None:
        values["rope_parameters"] = _ropes(fields, values, slides)
    elif not isinstance(nested, Mapping) or not set(nested) & {_FULL, _NEAR}:
        raise UnsupportedError(
            f"{fields.where}: 'rope_parameters' is {shown(nested)}, but must have an object for each of {_FULL} and "
            f"{_NEAR}."
        )
    else:  # transformers drops those without a layer
        values["rope_parameters"] = {kind: nested[kind] for kind in nested if kind in types}
    return Fields(values, fields.where)


def _expect_heads(fields: Fields, layers: int, heads: int) -> None:
    """UnsupportedError for MTP layers that are not what the published ones are: sliding, dense and without limits."""
    allowed: dict[str, Sequence[Any]] = dict.fromkeys(_LIMITS, (0.0, 0, None))
    allowed |= dict.fromkeys(("layer_types", "mtp_layer_types"), (_NEAR,))
    allowed |= dict.fromkeys(("mlp_layer_types", "mtp_mlp_layer_types"), ("dense",))
    slides = fields.values.get("layer_types")
    if isinstance(slides, list) and _NEAR in slides:
        near = slides.index(_NEAR)
        listed = {name: fields.values.get(name) for name in _ROPES}
        allowed |= {name: value[near : near + 1] for name, value in listed.items() if isinstance(value, list)}
    for name, known in allowed.items():
        value, first = fields.values.get(name), 0 if name.startswith("mtp_") else layers
        if not heads or not isinstance(value, list) or (first and len(value) != layers + heads):
            continue
        odd = [one for one in value[first:] if one not in known]
        if odd:
            raise UnsupportedError(
                f"{fields.where}: {name!r} has {shown(odd[0])} for an MTP layer, but MTP layers of this family slide "
                "as the others do, and have an MLP without limits."
            )


def _ropes(fields: Fields, values: ConfigJson, slides: list[bool]) -> ConfigJson:
    """`rope_parameters` by layer type, from the lists in `values`, which are removed; full layers have the scaling."""
    ropes: dict[bool, ConfigJson] = {False: {}, True: {}}
    for name in _ROPES:
        value = values.pop(name, None)
        listed = value if isinstance(value, list) else [value] * len(slides)
        by_type = {} if value is None else decoder.by_window(fields, name, listed, slides, None)
        for near, one in by_type.items():
            ropes[near][name.removesuffix("s")] = one
    scaling = values.pop("rope_scaling", None) or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"{fields.where}: 'rope_scaling' is {shown(scaling)}, but must be an object.")
    return {_FULL: {**ropes[False], **scaling}, _NEAR: ropes[True]}


def _sliding_heads(fields: Fields, sizes: Mapping[str, Any], slides: list[bool]) -> int:
    """The query heads of sliding layers, which three fields may state."""
    default = sizes["num_attention_heads"]
    published = fields.take("attention_other_setting", None)
    if published is not None:
        other = Fields(published, f"{fields.where}, attention_other_setting")
        default = other.integer("num_attention_heads", default)
        other.expect("attention_type", _NEAR)
        other.expect("num_attention_groups", sizes["num_key_value_heads"])
        other.expect("head_dim", sizes["head_dim"])
        other.expect("true_head_dim", sizes["head_dim"])
        other.finish()
    heads = fields.integer("num_sliding_attention_heads", default)
    changed = [index for index, near in enumerate(slides) if near and heads != sizes["num_attention_heads"]]
    for layer in decoder.layer_overrides(fields, changed):
        layer.expect("num_attention_heads", heads)
        layer.finish()
    return heads


def _limits(fields: Fields, name: str, layers: int) -> tuple[float, ...]:
    """A limit for each layer; 0: none."""
    value: Any = fields.take(name, [0.0] * layers)
    known = isinstance(value, list) and len(value) == layers
    if not known or any(type(one) not in (int, float, type(None)) for one in value):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(value)}, but must list {layers} numbers or null.")
    return tuple(float(one or 0) for one in value)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them."""
    D, std, H, biased = config.hidden_size, config.initializer_range, config.head_dim, config.attention_bias
    flags: dict[str, Any] = {"std": std, "shared": config.share_expert_dim, "selection_bias": True}

    def layer(kind: LayerKind) -> Tree:
        heads = config.sliding_attention_heads if kind.slides else config.num_attention_heads
        biases = {"qkv_bias": biased, "o_bias": biased}
        attention = attention_leaves(D, heads, config.num_key_value_heads, H, std=std, **biases)
        attention |= head_norms(config, 0.0) | {"gate_proj": weight((heads, D), ("heads", "embed"), std)}
        experts = moe_leaves(D, config.n_routed_experts, config.moe_intermediate_size, **flags)
        return layer_leaves(D, attention, experts if kind.routed else usual_mlp(config), norm_value=0.0)

    leaves = decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)], norm_value=0.0)
    own_output = not config.tie_word_embeddings
    return leaves | mtp.heads(config, layer(parsed(_HEAD)[0]), norm_value=0.0, own_output=own_output)


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block."""
    return _HEAD


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; experts are three tensors [E, out, in]."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = {path: decoder.decoder_name(path) for path in flat if not path.startswith("mtp.")}
    for pattern, new in _ON_DISK:
        names = {path: storage.renamed(name, pattern, new) for path, name in names.items()}
    if not config.num_nextn_predict_layers:
        return names
    # vLLM, vllm/model_executor/models/step3p5_mtp.py at 12c9ac281e8d: these names, and the maths; so does SGLang,
    # python/sglang/srt/models/step3p5_mtp.py at 03d73863b6f9, which says that heads are chained before their norms.
    around = {"norm": "transformer.shared_head.norm", "lm_head": "transformer.shared_head.output"}
    block_names, first = hf_names(mtp.blocks(config)[0]), config.num_hidden_layers
    heads = mtp.names_of(config, block_names, "model.layers.{}.", first=first, around=around)
    return names | {path: name for path, name in heads.items() if path in flat}


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of MTP layers that the config does not count, which stand after the last layer."""
    if config.num_nextn_predict_layers:
        return ()
    first = config.num_hidden_layers
    return (rf"model\.layers\.({'|'.join(str(first + k) for k in range(mixture.HEADS_LIMIT))})\..*",)


freqs_cis = decoder.freqs_cis_by_window
stream_norm = rms_norm_zero_centered


def _split(kind: str) -> tuple[str, int | None]:
    """(a kind without the number of its limits, that number, or None without limits)."""
    plain, _, last = kind.rpartition("_")
    return (plain, int(last)) if last.isdigit() else (kind, None)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q = apply_rotary(rms_norm_zero_centered(q, weights["q_norm"], eps=eps), freqs)
    k = apply_rotary(rms_norm_zero_centered(k, weights["k_norm"], eps=eps), freqs)
    gate = split_heads(elementwise(torch.sigmoid, linear(normed, weights["gate_proj"])), 1)
    mixed = ctx.attend(q, k, v, mask, scale=config.query_pre_attn_scalar**-0.5) * gate
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm_zero_centered(x, layer["post_attention_layernorm"], eps=eps)
    form = _split(kind)[1]
    of_experts, of_shared = (_act(limit, config) for limit in ((0.0, 0.0) if form is None else config.limits[form]))
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", acting_mlp(mlp, normed, act=of_shared, tap=ctx.tap))
    choice: dict[str, Any] = {"k": config.num_experts_per_tok, "bias": mlp["selection_bias"], "norm_eps": 0.0}
    route = functools.partial(sigmoid_top_k, renormalize=True, scale=config.moe_router_scaling_factor, **choice)
    return x + ctx.tap("mlp", ctx.moe(mlp, normed, route, act=(of_experts, of_shared), dtypes=ROUTER))


def _act(limit: float, config: Config) -> Act:
    if not limit:
        return functools.partial(glu, activation=config.hidden_act)
    return functools.partial(limited_glu, activation=config.hidden_act, limit=limit)


_LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
PRESETS: dict[str, ConfigJson] = {
    "step-3.5-flash": {"model_type": "step3p5", "vocab_size": 128896, "hidden_size": 4096, "intermediate_size": 11264}
    | {"num_hidden_layers": 45, "num_attention_heads": 64, "num_sliding_attention_heads": 96, "sliding_window": 512}
    | {"max_position_embeddings": 262144, "moe_router_scaling_factor": 3.0, "num_nextn_predict_layers": 3}
    | {"layer_types": [_NEAR if index % 4 else _FULL for index in range(45)]}
    | {"rope_theta": [1e4 if index % 4 else 5e6 for index in range(45)]}
    | {"partial_rotary_factors": [1.0 if index % 4 else 0.5 for index in range(45)]}
    | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 131072}}
    | {"swiglu_limits": [0.0] * 43 + [7.0] * 2, "swiglu_limits_shared": [0.0] * 44 + [16.0]}
}
