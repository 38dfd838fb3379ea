"""Default parts of layers with the gated delta rule (`fnmodels.ops.recurrent.delta_rule`): leaves, mixers, names.

Queries, keys and values are projected, and each goes through a short convolution before the delta rule. Gated DeltaNet
has one decay per head, from a projection `a_proj`; its output is normalized and gated by `z_proj`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.ops import ACTIVATIONS, project_out, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.conv_reads import reads_of
from fnmodels.ops.recurrent.delta_rule import delta_rule
from fnmodels.ops.recurrent.gated_norm import norm_then_sigmoid, norm_then_silu
from fnmodels.tree import Tree

from ..config_json import Fields
from ..context import Context
from ..spec import Leaf, LogUniform, norm, weight
from ..storage import Stored, fuse

# Config fields of Gated DeltaNet, under the names that config.json has too.
SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
STEPS = LogUniform(math.expm1(1e-3), math.expm1(1e-1))  # of dt_bias, whose softplus is then from 0.001 to 0.1


def sizes_from_hf(fields: Fields, *defaults: int) -> dict[str, Any]:
    """The Config fields SIZES; defaults: those of absent fields, in their order."""
    return {n: fields.integer(n, default, high=1 << 16) for n, default in zip(SIZES, defaults, strict=True)}


def check_heads(config: Any) -> None:
    """For `Config.__post_init__`: ConfigError unless each key head serves a whole number of value heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ConfigError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}.")


def conv_leaves(width: int, kernel: int, sizes: Mapping[str, tuple[int, int]], std: float) -> dict[str, Leaf]:
    """Projections of the residual stream under `name`_proj, and for q, k and v the short convolutions that follow.

    sizes: {name: (heads, rows of each)}. The axis of q and k is that of key heads.
    """
    leaves: dict[str, Leaf] = {}
    for name, (count, unit) in sizes.items():
        axis = "linear_kv_heads" if name in "qk" else "linear_heads"
        leaves[f"{name}_proj"] = weight((count * unit, width), (axis, "embed"), std, unit=unit)
        if name in "qkv":
            leaves[f"{name}_conv"] = weight((count * unit, 1, kernel), (axis, "one", "kernel"), std, unit=unit)
    return leaves


def gated_delta_leaves(config: Any) -> dict[str, Leaf]:
    """Projections to queries and keys (key heads), values, output gate z, decay a and strength b (value heads)."""
    D, K, std = config.hidden_size, config.linear_conv_kernel_dim, config.initializer_range
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    sizes = {"q": (keys, dk), "k": (keys, dk), "v": (heads, dv), "z": (heads, dv), "b": (heads, 1), "a": (heads, 1)}
    leaves = conv_leaves(D, K, sizes, std)
    leaves["A_log"] = Leaf((heads,), torch.float32, ("linear_heads",), LogUniform(0.01, 16.0), decay=False)
    leaves["dt_bias"] = norm(heads, "linear_heads")
    leaves["norm"] = norm(dv, "linear_head_dim")
    return leaves | {"o_proj": weight((D, heads * dv), ("embed", "linear_heads"), std, unit=dv)}


def channel_decay_leaves(width: int, heads: int, head_dim: int, std: float) -> dict[str, Leaf]:
    """Parameters of Kimi Delta Attention around its rule: a decay for each key channel, the norm, and the output."""
    rows, axis = heads * head_dim, ("linear_heads",)
    return {
        "A_log": Leaf((heads,), torch.float32, axis, LogUniform(1.0, 16.0), decay=False),
        "dt_bias": Leaf((rows,), torch.float32, axis, STEPS, decay=False, unit=head_dim),
        "norm": norm(head_dim, "linear_head_dim"),
        "o_proj": weight((width, rows), ("embed", "linear_heads"), std, unit=head_dim),
    }


def narrow_leaves(config: Any) -> dict[str, Leaf]:
    """Parameters of `narrow_kimi_delta`: projections to q, k, v and strength b of the heads, and through a width of
    one head those of the decay f and of the output gate g."""
    D, std, heads, d = config.hidden_size, config.initializer_range, config.linear_num_heads, config.linear_head_dim
    sizes = {"q": (heads, d), "k": (heads, d), "v": (heads, d), "b": (heads, 1)}
    leaves = conv_leaves(D, config.linear_conv_kernel_dim, sizes, std)
    for name in "fg":
        leaves[f"{name}_a_proj"] = weight((d, D), ("linear_latent", "embed"), std)
        leaves[f"{name}_b_proj"] = weight((heads * d, d), ("linear_heads", "linear_latent"), std, unit=d)
    return leaves | channel_decay_leaves(D, heads, d, std)


def separate_names(ours: str, theirs: str, leaves: Iterable[str]) -> dict[str, str]:
    """{path: name on disk} of such leaves at `ours`, in families whose files fuse none of the projections."""
    own = {"z_proj": "g_proj.weight", "norm": "o_norm.weight", "A_log": "A_log", "dt_bias": "dt_bias"}
    return {
        f"{ours}.{leaf}": f"{theirs}.{own.get(leaf) or leaf.replace('_conv', '_conv1d') + '.weight'}" for leaf in leaves
    }


def gated_delta_names(
    there: str, own: Mapping[str, str], flat: Mapping[str, Leaf], fused: Sequence[str], groups: int
) -> dict[str, Stored]:
    """{path: name on disk} of Gated DeltaNet at `there`, whose files have the projections of the letters in `fused` as
    one tensor each, by rows of one of `groups` key heads after the other. own: {leaf: path}."""
    names: dict[str, Stored] = {own[name]: f"{there}.{name}" for name in ("A_log", "dt_bias")}
    names |= {own["norm"]: f"{there}.norm.weight", own["o_proj"]: f"{there}.out_proj.weight"}
    names |= fuse(f"{there}.conv1d.weight", {own[f"{n}_conv"]: flat[own[f"{n}_conv"]].shape[0] for n in "qkv"})
    for parts in fused:
        rows = {own[f"{n}_proj"]: flat[own[f"{n}_proj"]].shape[0] for n in parts}
        names |= fuse(f"{there}.in_proj_{parts}.weight", rows, groups=groups)
    return names


def delta_mixer(
    weights: Tree,
    x: Tensor,
    mask: Segments,
    g: Tensor,
    beta: Tensor,
    *,
    widths: tuple[int, int],
    activation: str,
    ctx: Context,
) -> Tensor:
    """Short convolutions of the projections of x [B, S, D], then the delta rule: [B, S, Hv, dv].

    g, beta: as for `delta_rule`. widths: dk and dv of a head.
    """
    state, ids, kernel, silu = ctx.state() or {}, mask.segment_ids, ctx.options.kernel, activation == "silu"
    last, taps = state.get("segment"), [weights[f"{name}_conv"][:, 0] for name in "qkv"]
    tails = state["conv"].split([len(tap) for tap in taps], -1) if state else [None] * 3
    # x may be a part of the tokens (sequence parallelism), which its projections gather
    reads = reads_of(ids, taps[0].shape[1], x.shape[0], last, kernel) if ids.shape[1] > 1 else None
    how: dict[str, Any] = {"silu": silu, "overwrite": True, "reads": reads, "kernel": kernel}

    def mixed(name: str, tap: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:  # its projection lives no longer
        y, after = short_conv(linear(x, weights[f"{name}_proj"]), tap, None, ids, tail, last, **how)
        return y if silu else elementwise(ACTIVATIONS[activation], y), after

    found, kept = zip(*map(mixed, "qkv", taps, tails), strict=True)
    dk, dv = widths
    q, k, v = (split_heads(t, size) for t, size in zip(found, (dk, dk, dv), strict=True))
    given = q, k, v, g, beta, ids, state.get("state"), last
    o, S = delta_rule(*given, scale=dk**-0.5, normalize=True, overwrite=True, kernel=kernel)
    ctx.keep(conv=torch.cat(kept, -1), state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    return o


def kimi_delta(
    weights: Tree, x: Tensor, mask: Segments, decay: Tensor, gate: Tensor, config: Any, ctx: Context
) -> Tensor:
    """Kimi Delta Attention (arXiv 2510.26692) on x [B, S, D]: normalized heads [B, S, H, d] times their gates' sigmoid.

    decay, gate: [B, S, H, d], the logarithm of each key channel's decay and what the sigmoid of the output is of.
    """
    beta, d = elementwise(torch.sigmoid, linear(x, weights["b_proj"])), config.linear_head_dim
    o = delta_mixer(weights, x, mask, decay, beta, widths=(d, d), activation=config.hidden_act, ctx=ctx)
    return norm_then_sigmoid(o, gate, weights["norm"], eps=config.rms_norm_eps)


def narrow_kimi_delta(
    weights: Tree, x: Tensor, mask: Segments, config: Any, ctx: Context, *, bound: float | None = None
) -> Tensor:
    """`kimi_delta` on x [B, S, D] whose decay and gate come through a narrow width. bound: see `channel_decay`."""
    f = linear(linear(x, weights["f_a_proj"]), weights["f_b_proj"])
    gate = split_heads(linear(linear(x, weights["g_a_proj"]), weights["g_b_proj"]), config.linear_head_dim)
    return kimi_delta(weights, x, mask, channel_decay(weights, f, config.linear_head_dim, bound), gate, config, ctx)


def channel_decay(weights: Tree, f: Tensor, head_dim: int, bound: float | None = None) -> Tensor:
    """The logarithm [B, S, H, d] of the decay of each key channel, of its projection f [B, S, H d].

    bound: the least of them, by a sigmoid; None: there is none.
    """
    rate, f = upcast(weights["A_log"]).exp()[:, None], split_heads(upcast(f) + weights["dt_bias"], head_dim)
    return -rate * elementwise(F.softplus, f) if bound is None else bound * elementwise(torch.sigmoid, rate * f)


def gated_delta_net(
    weights: Tree,
    x: Tensor,
    mask: Segments,
    config: Any,
    ctx: Context,
    *,
    eps: float,
    strength: float = 1.0,
    gated: Callable[..., Tensor] = norm_then_silu,
) -> Tensor:
    """A Gated DeltaNet layer on x [B, S, D]: the delta rule and a gated norm. strength: the largest beta, at most 2."""
    beta = elementwise(torch.sigmoid, linear(x, weights["b_proj"]))
    beta = beta if strength == 1.0 else strength * beta
    rate = elementwise(F.softplus, upcast(linear(x, weights["a_proj"])) + weights["dt_bias"])
    g = -upcast(weights["A_log"]).exp() * rate
    widths = config.linear_key_head_dim, config.linear_value_head_dim
    o = delta_mixer(weights, x, mask, g, beta, widths=widths, activation=config.hidden_act, ctx=ctx)
    z = split_heads(linear(x, weights["z_proj"]), widths[1])
    return project_out(weights, gated(o, z, weights["norm"], eps=eps))
