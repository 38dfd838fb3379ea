"""`Leaf`, the declaration of one parameter, and the leaves of common layers; a family's `spec` is a tree of leaves."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnmodels.models.common.family import DecoderConfig, LatentConfig, UsualConfig, field_of
from fnmodels.tree import Tree


@dataclass(frozen=True)
class Normal:
    """Draws from N(0, std^2).

    Args:
        std: The standard deviation.
    """

    std: float = 0.02


@dataclass(frozen=True)
class Constant:
    """Fills with one value: 1 for norms, 0 for biases.

    Args:
        value: The value of all elements.
    """

    value: float = 0.0


@dataclass(frozen=True)
class Parts:
    """Fills equal parts of a vector, one after the other, with one value each."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class LogUniform:
    """Draws the logarithm of a number uniform between low and high: rates of decay."""

    low: float
    high: float


@dataclass(frozen=True)
class Uniform:
    """Draws uniform between low and high."""

    low: float
    high: float


@dataclass(frozen=True)
class Sinusoids:
    """Fills a table [positions, D] with sines, then cosines, of periods from 2 pi to `longest` 2 pi."""

    longest: float = 10000.0


@dataclass(frozen=True)
class InTurn:
    """Fills a table [rows, k] with numbers below `count`, k different ones in each row, as they come in turn."""

    count: int


@dataclass(frozen=True)
class Leaf:
    """The declaration of one parameter.

    Args:
        shape: Sizes; a linear weight is [out, in].
        dtype: The default dtype; initialization and loading can choose another.
        axes: A logical name per dimension (embed, heads, kv_heads, mlp, vocab, expert, ...), which a sharding plan maps
            to mesh dimensions.
        init: `Normal`, `Constant`, `Parts`, `Uniform`, `LogUniform`, `Sinusoids` or `InTurn`.
        trainable: False for checkpoint state without a gradient (a router's selection bias).
        decay: Whether weight decay applies (not to norms, biases and embeddings).
        keep_dtype: Whether the parameter is in `dtype` at least, whatever the model is cast to or loaded in.
        unit: Elements per head along a heads axis; sharding plans shard between heads only.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    init: Normal | Constant | Parts | Uniform | LogUniform | Sinusoids | InTurn
    trainable: bool = True
    decay: bool = True
    keep_dtype: bool = False
    unit: int = 1

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"A Leaf of shape {self.shape} needs {len(self.shape)} axes, not {self.axes}.")


def weight(shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.02, *, unit: int = 1) -> Leaf:
    """A weight matrix: normal init, weight decay."""
    return Leaf(shape, torch.float32, axes, Normal(std), unit=unit)


def embedding(rows: int, size: int, std: float = 0.02, *, axis: str = "vocab", size_axis: str = "embed") -> Leaf:
    """An embedding table: normal init, no weight decay, which would shrink rows that no batch contains."""
    return Leaf((rows, size), torch.float32, (axis, size_axis), Normal(std), decay=False)


def norm(size: int, axis: str, value: float = 1.0, *, unit: int = 1) -> Leaf:
    """A norm's weight [size], filled with `value`: no weight decay."""
    return Leaf((size,), torch.float32, (axis,), Constant(value), decay=False, unit=unit)


def bias(size: int, axis: str, *, unit: int = 1) -> Leaf:
    """A bias [size]: zeros, no weight decay."""
    return Leaf((size,), torch.float32, (axis,), Constant(0.0), decay=False, unit=unit)


def layer_norm_leaves(name: str, size: int, axis: str) -> dict[str, Leaf]:
    """A LayerNorm's weight under `name` and its bias under `name`_bias."""
    return {name: norm(size, axis), f"{name}_bias": bias(size, axis)}


def decoder_leaves(
    config: DecoderConfig, layers: list[Tree], *, norm_bias: bool = False, norm_value: float = 1.0
) -> Tree:
    """A decoder's parameters, weights [out, in]: embedding, `layers`, final norm, and a head that is not the embedding.

    The head is `lm_head`, or `score` [labels, D] for the config's head "classification", and `score_bias` [labels]
    beside it for "tokens".

    norm_bias: the final norm has a bias (LayerNorm). norm_value: what its weight is initialized to.
    """
    V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
    last = layer_norm_leaves("norm", D, "embed") if norm_bias else {"norm": norm(D, "embed", norm_value)}
    tree: Tree = {"embed_tokens": embedding(V, D, std), "layers": layers, **last}
    if field_of(config, "head") == "none":
        return tree
    if (head := field_of(config, "head")) != "lm":
        labels = field_of(config, "num_labels")
        score = {"score": weight((labels, D), ("label", "embed"), std)}
        return tree | score | ({"score_bias": bias(labels, "label")} if head == "tokens" else {})
    return tree if config.tie_word_embeddings else tree | {"lm_head": weight((V, D), ("vocab", "embed"), std)}


def layer_leaves(width: int, attention: Tree, mlp: Tree, *, norm_bias: bool = False, norm_value: float = 1.0) -> Tree:
    """The parameters of a pre-norm layer. norm_bias: the norms have biases (LayerNorm). norm_value: see above."""
    names = ("input_layernorm", "post_attention_layernorm")
    first, second = (
        layer_norm_leaves(name, width, "embed") if norm_bias else {name: norm(width, "embed", norm_value)}
        for name in names
    )
    return {**first, "attention": attention, **second, "mlp": mlp}


def usual_attention(config: UsualConfig, *, qkv_bias: bool = False, o_bias: bool = False) -> dict[str, Leaf]:
    """`attention_leaves` with the sizes of the config."""
    heads, kv_heads, std = config.num_attention_heads, config.num_key_value_heads, config.initializer_range
    return attention_leaves(
        config.hidden_size, heads, kv_heads, config.head_dim, std=std, qkv_bias=qkv_bias, o_bias=o_bias
    )


def usual_mlp(config: UsualConfig, *, biases: bool = False) -> dict[str, Leaf]:
    """`gated_mlp_leaves` with the sizes of the config."""
    return gated_mlp_leaves(config.hidden_size, config.intermediate_size, std=config.initializer_range, biases=biases)


def head_norms(config: UsualConfig, value: float = 1.0) -> dict[str, Leaf]:
    """Per-head query and key norms, each with one weight [H] that all heads share."""
    return {name: norm(config.head_dim, "head_dim", value) for name in ("q_norm", "k_norm")}


def joint_head_norms(config: UsualConfig) -> dict[str, Leaf]:
    """Query and key norms over the concatenated heads, weights [N H] and [G H]."""
    H = config.head_dim
    heads, kv_heads = config.num_attention_heads * H, config.num_key_value_heads * H
    return {"q_norm": norm(heads, "heads", unit=H), "k_norm": norm(kv_heads, "kv_heads", unit=H)}


def attention_leaves(
    width: int, heads: int, kv_heads: int, head_dim: int, *, std: float, qkv_bias: bool = False, o_bias: bool = False
) -> dict[str, Leaf]:
    """q, k, v and o projections of grouped-query attention, and their biases as flagged."""
    q, kv, unit = heads * head_dim, kv_heads * head_dim, head_dim
    leaves = {
        "q_proj": weight((q, width), ("heads", "embed"), std, unit=unit),
        "k_proj": weight((kv, width), ("kv_heads", "embed"), std, unit=unit),
        "v_proj": weight((kv, width), ("kv_heads", "embed"), std, unit=unit),
        "o_proj": weight((width, q), ("embed", "heads"), std, unit=unit),
    }
    if qkv_bias:
        leaves["q_bias"] = bias(q, "heads", unit=unit)
        leaves |= {name: bias(kv, "kv_heads", unit=unit) for name in ("k_bias", "v_bias")}
    if o_bias:
        leaves["o_bias"] = bias(width, "embed")
    return leaves


def latent_attention_leaves(config: LatentConfig) -> dict[str, Leaf]:
    """Parameters of multi-head latent attention (`fnmodels.ops.mla`) and its o projection.

    attention_bias: of the projections that read x, and of o. "latent" is the axis of both latents; the rows of the
    shared rotary key follow those of the kv latent.
    """
    width, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    q_rank, kv_rank, value = config.q_lora_rank, config.kv_lora_rank, config.v_head_dim
    of_q, of_kv = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_nope_head_dim + value
    joint = kv_rank + config.qk_rope_head_dim
    if q_rank is None:
        leaves = {"q_proj": weight((heads * of_q, width), ("heads", "embed"), std, unit=of_q)}
    else:
        leaves = {
            "q_a_proj": weight((q_rank, width), ("latent", "embed"), std),
            "q_a_layernorm": norm(q_rank, "latent"),
            "q_b_proj": weight((heads * of_q, q_rank), ("heads", "latent"), std, unit=of_q),
        }
    leaves |= {
        "kv_a_proj": weight((joint, width), ("latent", "embed"), std),
        "kv_a_layernorm": norm(kv_rank, "latent"),
        "kv_b_proj": weight((heads * of_kv, kv_rank), ("heads", "latent"), std, unit=of_kv),
        "o_proj": weight((width, heads * value), ("embed", "heads"), std, unit=value),
    }
    if config.attention_bias:
        leaves |= {} if q_rank is None else {"q_a_bias": bias(q_rank, "latent")}
        leaves |= {"kv_a_bias": bias(joint, "latent"), "o_bias": bias(width, "embed")}
    return leaves


def gated_mlp_leaves(width: int, inner: int, *, std: float, biases: bool = False) -> dict[str, Leaf]:
    """gate, up and down projections of a gated MLP, and their biases as flagged."""
    leaves = {
        "gate_proj": weight((inner, width), ("mlp", "embed"), std),
        "up_proj": weight((inner, width), ("mlp", "embed"), std),
        "down_proj": weight((width, inner), ("embed", "mlp"), std),
    }
    if biases:
        leaves |= {"gate_bias": bias(inner, "mlp"), "up_bias": bias(inner, "mlp"), "down_bias": bias(width, "embed")}
    return leaves


def moe_leaves(
    width: int,
    experts: int,
    inner: int,
    *,
    std: float,
    biases: bool = False,
    shared: int = 0,
    selection_bias: bool = False,
    wide_router: bool = False,
) -> dict[str, Any]:
    """The parameters of an MoE layer: a router [E, D] and `experts` gated MLPs of width `inner`, as flagged.

    biases: of the router and the experts. shared: width of the shared expert, 0 for none. selection_bias: state without
    a gradient (see `train.losses.update_bias`). The router has its own axis "router", so that expert parallelism leaves
    it replicated. wide_router: its parameters stay fp32 when the model is cast; such a family declares
    `RouterDtypes(param="wide", projection="wide", ...)`.
    """
    stacks: dict[str, Any] = {
        "gate_proj": weight((experts, inner, width), ("expert", "expert_mlp", "embed"), std),
        "up_proj": weight((experts, inner, width), ("expert", "expert_mlp", "embed"), std),
        "down_proj": weight((experts, width, inner), ("expert", "embed", "expert_mlp"), std),
    }
    router = replace(weight((experts, width), ("router", "embed"), std), keep_dtype=wide_router)
    leaves: dict[str, Any] = {"router": router, "experts": stacks}
    if biases:
        sizes = {"gate_bias": (inner, "expert_mlp"), "up_bias": (inner, "expert_mlp"), "down_bias": (width, "embed")}
        for name, (size, axis) in sizes.items():
            stacks[name] = Leaf((experts, size), torch.float32, ("expert", axis), Constant(0.0), decay=False)
        leaves["router_bias"] = replace(bias(experts, "router"), keep_dtype=wide_router)
    if selection_bias:
        leaves["selection_bias"] = replace(bias(experts, "router"), trainable=False, keep_dtype=True)
    if shared:
        leaves["shared_expert"] = gated_mlp_leaves(width, shared, std=std)
    return leaves


def plain_mlp_leaves(width: int, inner: int, *, std: float, biases: bool = True) -> dict[str, Leaf]:
    """up and down projections of an MLP without a gate, and their biases as flagged."""
    leaves = {
        "up_proj": weight((inner, width), ("mlp", "embed"), std),
        "down_proj": weight((width, inner), ("embed", "mlp"), std),
    }
    return leaves | {"up_bias": bias(inner, "mlp"), "down_bias": bias(width, "embed")} if biases else leaves


def xielu_leaves() -> dict[str, Leaf]:
    """Parameters of `ops.mlp.xielu`: two trainable curvatures, before softplus, and two constants from the files."""
    curvatures = {"xielu_alpha_p": math.log(math.expm1(0.8)), "xielu_alpha_n": math.log(math.expm1(0.8 - 0.5))}
    leaves = {name: norm(1, "activation", value) for name, value in curvatures.items()}
    constants = {"xielu_beta": 0.5, "xielu_eps": -1e-6}
    return leaves | {
        name: Leaf((), torch.float32, (), Constant(value), trainable=False, decay=False)
        for name, value in constants.items()
    }
