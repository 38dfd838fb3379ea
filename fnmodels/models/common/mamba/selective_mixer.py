"""The mixer of Mamba 1 (arXiv 2312.00752): convolution, selective scan, gate; also in Falcon Mamba and Jamba.

[x | z] = projections of the input
x = silu(causal convolution of x)
[dt | B | C] = projections of x, normalized in Falcon Mamba and Jamba
output = o_proj(selective_scan(x, softplus(dt_proj(dt) + dt_bias), B, C, -exp(A_log), D) * silu(z))

Each channel decays by itself, and dt, B and C read all channels: tensor parallelism leaves them whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.ops import ACTIVATIONS, rms_norm, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.selective_scan import selective_scan
from fnmodels.tree import Tree

from ..context import Context
from ..spec import Leaf, LogUniform, bias, norm, weight
from ..storage import Stored, fuse

NORMS = ("none", "weightless", "weighted")  # of dt, B and C
_PARTS = ("step", "b", "c")  # in the order of x_proj on disk


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Sizes and switches of a mixer.

    inner: channels. state: numbers of a channel's state. rank: width between x and dt. kernel: taps of the convolution.
    norm: one of NORMS, with eps `norm_eps`. proj_bias: of the projections before and after.
    """

    inner: int
    state: int
    rank: int
    kernel: int = 4
    norm: str = "none"
    norm_eps: float = 1e-6
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self) -> None:
        if self.kernel < 2 or self.norm not in NORMS or min(self.inner, self.state, self.rank) < 1:
            raise ConfigError(f"{self} is no mixer: sizes are at least 1, the kernel has at least 2 taps.")

    @property
    def rows(self) -> dict[str, int]:
        """{part of x_proj: its width}."""
        return {"step": self.rank, "b": self.state, "c": self.state}


def selective_leaves(width: int, mixer: Selective, *, std: float) -> dict[str, Leaf]:
    """The parameters of a mixer on a residual stream of this width."""
    inner = mixer.inner
    leaves = {f"{name}_proj": weight((inner, width), ("channels", "embed"), std) for name in ("x", "z")}
    leaves["x_conv"] = weight((inner, 1, mixer.kernel), ("channels", "one", "kernel"), std)
    leaves |= {"x_conv_bias": bias(inner, "channels")} if mixer.conv_bias else {}
    for name, rows in mixer.rows.items():
        leaves[f"{name}_proj"] = weight((rows, inner), ("channels_latent", "channels"), std)
        leaves |= {f"{name}_norm": norm(rows, "channels_latent")} if mixer.norm == "weighted" else {}
    leaves["dt_proj"] = weight((inner, mixer.rank), ("channels", "channels_latent"), mixer.rank**-0.5)
    axes = ("channels", "channels_latent")
    leaves["dt_bias"] = Leaf((inner,), torch.float32, axes[:1], LogUniform(1e-3, 1e-1), decay=False)
    leaves["A_log"] = Leaf((inner, mixer.state), torch.float32, axes, LogUniform(1.0, 16.0), decay=False)
    leaves["D"] = norm(inner, "channels")
    leaves["o_proj"] = weight((width, inner), ("embed", "channels"), std)
    if mixer.proj_bias:
        leaves |= {f"{name}_bias": bias(inner, "channels") for name in ("x", "z")} | {"o_bias": bias(width, "embed")}
    return leaves


def selective_names(mixer: Selective, where: str, on_disk: str) -> dict[str, Stored]:
    """{path: name on disk} of the mixer at `where` in the tree ("layers.0.attention", say), and `on_disk` in files."""
    inner = mixer.inner
    names: dict[str, Stored] = {f"{where}.{name}": f"{on_disk}.{name}" for name in ("A_log", "D")}
    names |= {f"{where}.dt_proj": f"{on_disk}.dt_proj.weight", f"{where}.dt_bias": f"{on_disk}.dt_proj.bias"}
    names |= {f"{where}.o_proj": f"{on_disk}.out_proj.weight", f"{where}.x_conv": f"{on_disk}.conv1d.weight"}
    names |= fuse(f"{on_disk}.in_proj.weight", {f"{where}.{name}_proj": inner for name in ("x", "z")})
    names |= fuse(f"{on_disk}.x_proj.weight", {f"{where}.{name}_proj": n for name, n in mixer.rows.items()})
    names |= {f"{where}.x_conv_bias": f"{on_disk}.conv1d.bias"} if mixer.conv_bias else {}
    if mixer.proj_bias:
        names |= fuse(f"{on_disk}.in_proj.bias", {f"{where}.{name}_bias": inner for name in ("x", "z")})
        names[f"{where}.o_bias"] = f"{on_disk}.out_proj.bias"
    if mixer.norm == "weighted":
        theirs = zip(_PARTS, ("dt", "b", "c"), strict=True)
        names |= {f"{where}.{name}_norm": f"{on_disk}.{their}_layernorm.weight" for name, their in theirs}
    return names


def selective(weights: Tree, x: Tensor, mask: Segments, mixer: Selective, ctx: Context, *, activation: str) -> Tensor:
    """The mixer of x [B, S, D]: [B, S, D]. activation: of the convolution; the gate's is silu."""
    state, ids, kernel = ctx.state() or {}, mask.segment_ids, ctx.options.kernel
    last, silu = state.get("segment"), activation == "silu"
    before, z = (linear(x, weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in ("x", "z"))
    taps = weights["x_conv"][:, 0], weights.get("x_conv_bias"), ids, state.get("conv"), last
    inner, tail = short_conv(before, *taps, silu=silu, kernel=kernel)
    inner = inner if silu else elementwise(ACTIVATIONS[activation], inner)
    step, B, C = (_normed(linear(inner, weights[f"{name}_proj"]), weights, name, mixer) for name in _PARTS)
    dt = elementwise(F.softplus, linear(step, weights["dt_proj"]) + weights["dt_bias"])
    A, D = -upcast(weights["A_log"]).exp(), weights["D"]
    y, S = selective_scan(inner, dt, B, C, A, D, ids, state.get("state"), last, kernel=kernel)
    ctx.keep(conv=tail, state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    return linear((y * elementwise(F.silu, upcast(z))).to(x.dtype), weights["o_proj"], weights.get("o_bias"))


def _normed(x: Tensor, weights: Tree, name: str, mixer: Selective) -> Tensor:
    return x if mixer.norm == "none" else rms_norm(x, weights.get(f"{name}_norm"), eps=mixer.norm_eps)


def rank_of(value: Any, width: int) -> int:
    """The rank of dt for a `time_step_rank` of config.json, by default a sixteenth of the width, rounded up."""
    return -(-width // 16) if value == "auto" else int(value)
