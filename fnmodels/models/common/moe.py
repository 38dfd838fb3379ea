"""Default parts of a mixture-of-experts family: expert counts from config.json, the MoE layers, tensor names.

`GroupedConfig` and the functions from `shared_from_hf` on are for mixtures as in DeepSeek V3 (arXiv 2412.19437), with a
shared expert and group-limited routing.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import mtp
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.layer import Route
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree

from .config_json import Fields
from .context import Context
from .decoder import BaseConfig, check_sizes, decoder_name, sliding_layers
from .family import LayerKind
from .spec import Leaf, gated_mlp_leaves, moe_leaves
from .storage import Stack, Stored, TensorSlice, fuse, renamed_parts

HEADS_LIMIT = 16  # MTP heads: published models have one to three


def check_experts(experts: int, chosen: int) -> None:
    """For `Config.__post_init__`: ConfigError unless 1 <= chosen <= experts (top-k of the experts per layer)."""
    for value in (experts, chosen):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= experts:
            raise ConfigError(f"{chosen!r} of {experts!r} experts are to be chosen; both must be integers, at least 1.")


def experts_limit(layers: int) -> int:
    """The largest accepted number of experts per layer; a limit, because checkpoints list each expert's tensors.

    It is twice the largest published numbers: 896 per layer, 82,432 in total.
    """
    return max(1, min(1792, 165_000 // layers))


def experts_from_hf(fields: Fields, experts: int, chosen: int, layers: int) -> tuple[int, int]:
    """(number of experts, number of experts per token); `experts` and `chosen` are the family's defaults.

    The name of the first field differs per family, and transformers reads several.
    """
    high = experts_limit(layers)
    names = [n for n in ("num_experts", "num_local_experts", "n_routed_experts") if fields.take(n, None) is not None]
    counts = {fields.integer(name, experts, high=high) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, names))} disagree.")
    return counts.pop(), fields.integer("num_experts_per_tok", chosen, high=high)


def sparse_layers(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer is an MoE layer: every `decoder_sparse_step`th one is, except those in `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    chosen = numbers_of_layers(fields, "mlp_only_layers", dense, layers)
    return [i not in chosen and (i + 1) % step == 0 for i in range(layers)]


def routed_layers(fields: Fields, layers: int, dense: int = 1) -> list[bool]:
    """Whether each layer is an MoE layer: from `mlp_layer_types`, or all after the first `first_k_dense_replace`.

    dense: the family's default of the latter. transformers ignores it beside a list, and so does this function.
    """
    first = fields.integer("first_k_dense_replace", dense, low=0)
    dense_ones = sliding_layers(fields, [i < first for i in range(layers)], "dense", "sparse", name="mlp_layer_types")
    return [not dense_layer for dense_layer in dense_ones]


def mlp_types(kinds: Iterable[LayerKind]) -> list[str]:
    """The list `mlp_layer_types` for config.json, which `routed_layers` reads back."""
    return ["sparse" if kind.routed else "dense" for kind in kinds]


def numbers_of_layers(fields: Fields, name: str, value: Any, layers: int) -> set[int]:
    """The set of layer indices in the list `value` of field `name`; ConfigError if it is not such a list."""
    if isinstance(value, list) and len(value) <= layers and all(type(i) is int and 0 <= i < layers for i in value):
        return set(value)
    raise ConfigError(f"{fields.where}: {name!r} must be a list of at most {layers} numbers of layers, below {layers}.")


def expert_names(prefix: str, experts: int, name: str) -> Stack:
    """The Stack of a parameter [E, ...] stored as one tensor per expert: PREFIX.0.gate_proj.weight and so on.

    prefix: "model.layers.3.mlp.experts". name: what follows the expert's number, "gate_proj.weight".
    """
    return Stack(tuple(f"{prefix}.{index}.{name}" for index in range(experts)))


def transposed_experts(ours: str, theirs: str, width: int, inner: int, *, in_turn: bool) -> dict[str, TensorSlice]:
    """{path: TensorSlice} of experts [E, out, in] stored as two tensors [E, in, out], gate and up fused in one.

    in_turn: the 2 `inner` columns of gate and up are interleaved; else gate is the first half. ours, theirs: the prefix
    of the paths and of the names on disk.
    """
    rows, groups = (1, inner) if in_turn else (inner, 1)
    parts = {f"{ours}.down_proj": TensorSlice(f"{theirs}.down_proj", 0, width, width, transposed=True, batched=True)}
    for i, leaf in enumerate(("gate", "up")):
        parts[f"{ours}.{leaf}_proj"] = TensorSlice(
            f"{theirs}.gate_up_proj", i * rows, (i + 1) * rows, 2 * inner, groups=groups, transposed=True, batched=True
        )
    return parts


def stacked_experts(where: str, inner: int) -> dict[str, Stored]:
    """{path: name on disk} of experts [E, out, in] stored as two tensors [E, out, in], gate and up fused in one.

    where: "layers.3.mlp.experts". inner: the width of an expert; its rows of gate come before those of up.
    """
    name, rows = f"model.{where}.gate_up_proj", 2 * inner
    return {
        f"{where}.gate_proj": TensorSlice(name, 0, inner, rows, batched=True),
        f"{where}.up_proj": TensorSlice(name, inner, rows, rows, batched=True),
        f"{where}.down_proj": f"model.{where}.down_proj",
    }


def moe_name(path: str, experts: int) -> Stored:
    """`decoder_name` for MoE layers with one tensor per expert: mlp.gate, mlp.experts.7.up_proj and so on."""
    head, _, last = path.rpartition(".")
    if head.endswith("mlp.experts"):
        return expert_names(f"model.{head}", experts, f"{last}.weight")
    if path.endswith("mlp.selection_bias"):
        return f"model.{head}.gate.e_score_correction_bias"
    return decoder_name(path.replace(".mlp.router", ".mlp.gate"))


def block_sparse_names(paths: Iterable[str], experts: int) -> dict[str, Stored]:
    """{path: name on disk} as in Mixtral: MoE layers are `block_sparse_moe`, w1, w2, w3 are gate, down and up."""

    def name(path: str) -> Stored:
        head, _, last = path.rpartition(".")
        where = f"model.{head}".replace(".mlp", ".block_sparse_moe")
        if head.endswith("experts"):
            number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[last]
            return expert_names(where, experts, f"{number}.weight")
        moe_names = {"router": "gate.weight", "selection_bias": "e_score_correction_bias"}
        return f"{where}.{moe_names[last]}" if last in moe_names else decoder_name(path)

    return {path: name(path) for path in paths}


@dataclass(frozen=True, kw_only=True)
class SharedConfig(BaseConfig):
    """The Config fields of a mixture with a shared expert; intermediate_size: dense layers'."""

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1  # width of the shared expert, in routed experts; 0: none
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shared(self)


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(SharedConfig):
    """The Config fields of a mixture with a shared expert and group-limited routing.

    num_nextn_predict_layers: MTP heads, params["mtp"]; not used by `forward`.
    """

    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)
        if self.num_nextn_predict_layers < 0:
            raise ConfigError(f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; there are at least 0.")


SHARED = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
GROUPED = (*SHARED, "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")


def shared_from_hf(fields: Fields, layers: int, *, dense: int, scale: float, heads: int = 0) -> dict[str, Any]:
    """The Config fields of MoE layers with a shared expert, after the first, dense layers.

    dense, scale: the family's defaults. heads: the number of MTP heads, each of which has experts like a layer.
    """
    fields.integer("n_routed_experts", high=experts_limit(layers + heads))
    first = min(fields.integer("first_k_dense_replace", dense, low=0), layers)
    return {name: fields.integer(name) for name in SHARED} | {
        "routed_scaling_factor": fields.number("routed_scaling_factor", scale),
        "layer_kinds": ("full",) * first + ("full_moe",) * (layers - first),
    }


def grouped_from_hf(
    fields: Fields, layers: int, *, dense: int, scale: float, scoring: tuple[str, ...] = ("sigmoid",)
) -> dict[str, Any]:
    """As `shared_from_hf`, for group-limited sigmoid routing with a selection bias, and MTP heads.

    scoring: the values of `scoring_func` that mean a sigmoid in this family.
    """
    fields.expect("scoring_func", *scoring)
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_router_dtype", "float32", "fp32")
    heads = fields.integer("num_nextn_predict_layers", 1, low=0, high=HEADS_LIMIT)
    return shared_from_hf(fields, layers, dense=dense, scale=scale, heads=heads) | {
        "n_group": fields.integer("n_group"),
        "topk_group": fields.integer("topk_group"),
        "norm_topk_prob": fields.boolean("norm_topk_prob", True),
        "num_nextn_predict_layers": heads,
    }


def grouped_to_hf(config: Any) -> ConfigJson:
    """The fields that `grouped_from_hf` reads back, except the number of MTP heads."""
    dense = config.layer_kinds.count("full")
    return {name: getattr(config, name) for name in GROUPED} | {"first_k_dense_replace": dense}


def check_shared(config: Any) -> None:
    """For `Config.__post_init__`: ConfigError unless the numbers of experts and their widths make sense."""
    check_experts(config.n_routed_experts, config.num_experts_per_tok)
    check_sizes(config, "moe_intermediate_size", *["n_shared_experts"] * bool(config.n_shared_experts))


def check_groups(config: Any) -> None:
    """For `Config.__post_init__`: ConfigError if the top-k cannot be chosen from `topk_group` of `n_group` groups."""
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    groups, kept = config.n_group, config.topk_group
    check_shared(config)
    check_sizes(config, "n_group", "topk_group")
    if experts % groups or kept > groups or chosen > experts // groups * kept:
        raise ConfigError(
            f"num_experts_per_tok {chosen} of n_routed_experts {experts} cannot be chosen from topk_group {kept} of "
            f"n_group {groups} equal groups."
        )


def grouped_names(config: Any, paths: Iterable[str]) -> dict[str, Stored]:
    """{path: name on disk}: one tensor per expert, and MTP heads as layers after the last one."""

    def name(path: str) -> Stored:
        path = mtp.layer_path(path, config.num_hidden_layers).replace(".shared_expert.", ".shared_experts.")
        return moe_name(path, config.n_routed_experts)

    return {path: name(path) for path in paths}


# Parts of names in files of Ling and of Sarvam, which are those of their code.
_OF_LING = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "e_score_correction_bias": "expert_bias",
}


# Of the trait `in_memory`, of models with these names on disk whose modules have q, k and v apart.
LING_IN_MEMORY = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.query_key_value\.": ".self_attn.{leaf}_proj.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.query_layernorm\.": ".self_attn.q_norm.",
    r"\.attention\.key_layernorm\.": ".self_attn.k_norm.",
    r"\.gate\.expert_bias$": ".gate.e_score_correction_bias",
}


def names_of_ling(names: dict[str, Stored], flat: Mapping[str, Leaf]) -> dict[str, Stored]:
    """The names on disk of the parameters `flat` as Ling's, where q, k and v are one tensor."""
    for where in sorted({path.rpartition(".")[0] for path in flat if path.endswith(".q_proj")}):
        for last, name in (("proj", "weight"), ("bias", "bias")):
            rows = {path: flat[path].shape[0] for n in "qkv" if (path := f"{where}.{n}_{last}") in flat}
            there = f"model.{where.replace('.attention', '.self_attn')}"
            names = names | (fuse(f"{there}.query_key_value.{name}", rows) if rows else {})
    return {path: renamed_parts(name, _OF_LING) for path, name in names.items()}


def grouped_leaves(config: Any, kind: LayerKind, *, selection_bias: bool, wide_router: bool = False) -> Tree:
    """The parameters under "mlp" of a layer of this kind: a gated MLP, or a router, experts and the shared expert.

    selection_bias, wide_router: as for `moe_leaves`.
    """
    width, std = config.hidden_size, config.initializer_range
    if not kind.routed:
        return gated_mlp_leaves(width, config.intermediate_size, std=std)
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    shared = config.n_shared_experts * inner
    flags = {"selection_bias": selection_bias, "wide_router": wide_router}
    return moe_leaves(width, experts, inner, std=std, shared=shared, **flags)


def grouped_choice(config: Any) -> dict[str, Any]:
    """Keyword arguments for `sigmoid_top_k` and `softmax_top_k`."""
    return {
        "k": config.num_experts_per_tok,
        "renormalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "groups": (config.n_group, config.topk_group),
    }


def grouped_route(mlp: Tree, config: Any) -> Route:
    """The router of group-limited sigmoid scores with a selection bias, of a layer with these parameters."""
    return functools.partial(sigmoid_top_k, bias=mlp.get("selection_bias"), **grouped_choice(config))


def attend(
    weights: Tree,
    x: Tensor,
    mask: Any,
    freqs: Tensor,
    config: Any,
    ctx: Context,
    gate: Tensor | None = None,
    norm: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Grouped-query attention of the normed x, with head norms and sinks where there are any: [B, S, D] -> [B, S, D].

    gate: [B, S, N, H or 1], which multiplies what the heads read. norm: that of heads; None: `rms_norm`.
    """
    norm, eps = norm or rms_norm, config.rms_norm_eps
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    if "q_norm" in weights:
        q, k = norm(q, weights["q_norm"], eps=eps), norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5, sinks=weights.get("sinks"))
    return project_out(weights, mixed if gate is None else mixed * gate)


def feed(mlp: Tree, x: Tensor, config: Any, ctx: Context, *, route: Route, dtypes: RouterDtypes) -> Tensor:
    """The experts of a layer that has a router, or its gated MLP: [B, S, D] -> [B, S, D]."""
    if "router" in mlp:
        return ctx.moe(mlp, x, route, act=config.hidden_act, dtypes=dtypes)
    return gated_mlp(mlp, x, activation=config.hidden_act, tap=ctx.tap)


def add_feed(
    layer: Tree, x: Tensor, attended: Tensor, config: Any, ctx: Context, *, route: Route, dtypes: RouterDtypes
) -> Tensor:
    """The rest of a pre-norm layer after its attention: both sublayers added to x [B, S, D]."""
    x = ctx.tap("middle", x + ctx.tap("attention", attended))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=config.rms_norm_eps)
    return x + ctx.tap("mlp", feed(layer["mlp"], normed, config, ctx, route=route, dtypes=dtypes))
