"""The mixer of Mamba 2 (arXiv 2405.21060), which five families have: convolution, state space duality, gated norm.

[z | x | B | C | dt] = projections of the input
x, B, C = silu(causal convolution of [x | B | C])
dt = clamp(softplus(dt + dt_bias))
output = o_proj(gated norm(ssd(x, dt, -exp(A_log), B, C, D), z))
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops import ACTIVATIONS, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.gated_norm import group_norm_then_silu, silu_then_group_norm
from fnmodels.ops.recurrent.ssd import ssd
from fnmodels.tree import Tree

from .. import decoder
from ..config_json import Fields, shown
from ..context import Context
from ..spec import Leaf, LogUniform, bias, norm, weight
from ..storage import Stored, fuse

NORMS = ("gate_first", "norm_first", "none")  # gate_first: the norm of the gated output; none: the gate alone
_PROJECTIONS = ("z", "x", "b", "c", "step")  # in the order of in_proj on disk
_CONVOLVED = ("x", "b", "c")

# {field of Mamba: (its name in config.json, the default of an absent one)} of the hybrids
HYBRID_FIELDS: dict[str, tuple[str, Any]] = {
    "heads": ("mamba_n_heads", 128),
    "head_dim": ("mamba_d_head", "auto"),
    "groups": ("mamba_n_groups", 1),
    "state": ("mamba_d_state", 256),
    "kernel": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "proj_bias": ("mamba_proj_bias", False),
}


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Sizes and switches of a mixer; its inner width is heads * head_dim.

    groups: of heads that share B and C, and of the norm. state: columns of a head's state. kernel: taps of the
    convolution. limits: least and greatest dt. norm: one of NORMS. proj_bias, out_bias: of the projections before and
    after. multipliers: of the projections to z, x, B, C and dt (Falcon-H1).
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int = 4
    limits: tuple[float, float] = (0.0, math.inf)
    norm: str = "gate_first"
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    multipliers: tuple[float, ...] = (1.0,) * len(_PROJECTIONS)

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigError(f"{self.heads} heads of a Mamba layer are not a multiple of its {self.groups} groups.")
        if self.kernel < 2 or self.norm not in NORMS or len(self.multipliers) != len(_PROJECTIONS):
            raise ConfigError(
                f"{self} is no Mamba mixer: the kernel has at least 2 taps, the norm is one of {', '.join(NORMS)}, and "
                f"there are {len(_PROJECTIONS)} multipliers."
            )

    @property
    def rows(self) -> dict[str, int]:
        """{projection: its output width}."""
        inner, shared = self.heads * self.head_dim, self.groups * self.state
        return {"z": inner, "x": inner, "b": shared, "c": shared, "step": self.heads}


def mamba_from_hf(
    fields: Fields, inner: int | None = None, names: Mapping[str, tuple[str, Any]] = HYBRID_FIELDS, **given: Any
) -> Mamba:
    """The mixer of a config.json. inner: its width if the file says it; ConfigError where the heads have another.

    names: as HYBRID_FIELDS. given: fields of `Mamba` that config.json does not hold under one name; by default both
    projections have a bias, or neither.
    """
    read: dict[str, Any] = {}
    for field, (name, default) in names.items():
        if field == "head_dim" and fields.take(name, default) == "auto":
            read[field] = max(1, (inner or 0) // read["heads"])
        else:
            read[field] = (fields.boolean if isinstance(default, bool) else fields.integer)(name, default)
    if inner is not None and read["heads"] * read["head_dim"] != inner:
        raise ConfigError(
            f"{fields.where}: {read['heads']} heads of {read['head_dim']} are not the inner width {inner} of a Mamba "
            "layer."
        )
    limits = given.get("limits") or time_step_limit(fields)
    return Mamba(**{"out_bias": read["proj_bias"], "limits": limits} | read | given)


def mamba_to_hf(mixer: Mamba, names: Mapping[str, tuple[str, Any]] = HYBRID_FIELDS) -> ConfigJson:
    """The fields that `mamba_from_hf` reads, for config.json."""
    fields = {name: getattr(mixer, field) for field, (name, _) in names.items()}
    return fields | {"time_step_limit": list(mixer.limits)}


def time_step_limit(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`: two numbers, the second usually infinite, as JSON of either dialect writes it."""
    for name in ("time_step_min", "time_step_max", "time_step_floor"):  # of fresh parameters
        fields.take(name, None)
    value = fields.take("time_step_limit", (0.0, math.inf))
    limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in value] if _is_list(value) else []
    if len(limits) != 2 or not all(map(_is_limit, limits)):
        raise ConfigError(
            f"{fields.where}: 'time_step_limit' is {shown(value)}, but must be two numbers from 0 to infinity."
        )
    return float(limits[0]), float(limits[1])


def _is_limit(value: Any) -> bool:
    """Whether it is a number from 0 that a float holds, or infinity; JSON's integers have any number of digits."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (0 <= value <= sys.float_info.max or value == math.inf)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def mamba_leaves(width: int, mixer: Mamba, *, std: float) -> dict[str, Leaf]:
    """The parameters of a mixer on a residual stream of this width."""
    heads, unit = mixer.heads, {"z": mixer.head_dim, "x": mixer.head_dim, "b": mixer.state, "c": mixer.state}
    axes = {name: "linear_kv_heads" if name in "bc" else "linear_heads" for name in _PROJECTIONS}
    leaves: dict[str, Leaf] = {}
    for name, rows in mixer.rows.items():
        axis, unit_size = axes[name], unit.get(name, 1)
        leaves[f"{name}_proj"] = weight((rows, width), (axis, "embed"), std, unit=unit_size)
        leaves |= {f"{name}_bias": bias(rows, axis, unit=unit_size)} if mixer.proj_bias else {}
        if name in _CONVOLVED:
            leaves[f"{name}_conv"] = weight((rows, 1, mixer.kernel), (axis, "one", "kernel"), std, unit=unit_size)
            leaves |= {f"{name}_conv_bias": bias(rows, axis, unit=unit_size)} if mixer.conv_bias else {}
    leaves["A_log"] = Leaf((heads,), torch.float32, ("linear_heads",), LogUniform(1.0, 16.0), decay=False)
    steps = LogUniform(math.expm1(1e-3), math.expm1(1e-1))  # softplus of it: from 0.001 to 0.1
    leaves["dt_bias"] = Leaf((heads,), torch.float32, ("linear_heads",), steps, decay=False)
    leaves["D"] = norm(heads, "linear_heads")
    if mixer.norm != "none":
        leaves["norm"] = norm(mixer.rows["x"], "linear_heads", unit=mixer.head_dim)
    leaves["o_proj"] = weight((width, mixer.rows["x"]), ("embed", "linear_heads"), std, unit=mixer.head_dim)
    return leaves | ({"o_bias": bias(width, "embed")} if mixer.out_bias else {})


def mamba_names(mixer: Mamba, where: str, on_disk: str) -> dict[str, Stored]:
    """{path: name on disk} of the mixer at `where` in the tree ("layers.0.attention", say), and `on_disk` in files."""
    rows = mixer.rows
    names: dict[str, Stored] = {f"{where}.{name}": f"{on_disk}.{name}" for name in ("A_log", "dt_bias", "D")}
    names[f"{where}.o_proj"] = f"{on_disk}.out_proj.weight"
    names |= {f"{where}.o_bias": f"{on_disk}.out_proj.bias"} if mixer.out_bias else {}
    names |= {f"{where}.norm": f"{on_disk}.norm.weight"} if mixer.norm != "none" else {}
    names |= fuse(f"{on_disk}.in_proj.weight", {f"{where}.{name}_proj": n for name, n in rows.items()})
    if mixer.proj_bias:
        names |= fuse(f"{on_disk}.in_proj.bias", {f"{where}.{name}_bias": n for name, n in rows.items()})
    names |= fuse(f"{on_disk}.conv1d.weight", {f"{where}.{name}_conv": rows[name] for name in _CONVOLVED})
    if mixer.conv_bias:
        names |= fuse(f"{on_disk}.conv1d.bias", {f"{where}.{name}_conv_bias": rows[name] for name in _CONVOLVED})
    return names


_HYBRID_NAMES = {  # of modules on disk
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


def hybrid_names(config: Any, mixers: Mapping[str, str]) -> dict[str, Stored]:
    """{path: name on disk} of a decoder with `config.mixer` at some places: {where in the tree: where on disk}."""
    names: dict[str, Stored] = {}
    for path, name in decoder.hf_names(config).items():
        for ours, theirs in _HYBRID_NAMES.items():
            name = name.replace(ours, theirs)
        names[path] = name
    for where, there in mixers.items():
        names |= mamba_names(config.mixer, where, there)
    return names


def mamba(
    weights: Tree, x: Tensor, mask: Segments, mixer: Mamba, ctx: Context, *, eps: float, activation: str = "silu"
) -> Tensor:
    """The mixer of x [B, S, D]: [B, S, D]. activation: of the convolution; the gate's is silu."""
    state, ids, kernel = ctx.state() or {}, mask.segment_ids, ctx.options.kernel
    last, multipliers = state.get("segment"), dict(zip(_PROJECTIONS, mixer.multipliers, strict=True))

    def projected(name: str) -> Tensor:
        return _scaled(linear(x, weights[f"{name}_proj"], weights.get(f"{name}_bias")), multipliers[name])

    taps = [weights[f"{name}_conv"][:, 0] for name in _CONVOLVED]
    added = torch.cat([weights[f"{name}_conv_bias"] for name in _CONVOLVED]) if mixer.conv_bias else None
    before, silu = torch.cat([projected(name) for name in _CONVOLVED], -1), activation == "silu"
    conv_arguments = torch.cat(taps), added, ids, state.get("conv"), last
    mixed, tail = short_conv(before, *conv_arguments, silu=silu, overwrite=True, kernel=kernel)
    del before  # as long as the sequence, and not read again
    mixed = mixed if silu else elementwise(ACTIVATIONS[activation], mixed)
    inner, B, C = mixed.split([len(tap) for tap in taps], -1)
    # in the activations' dtype, as the reference
    dt = elementwise(F.softplus, projected("step") + weights["dt_bias"]).clamp(*mixer.limits)
    heads, B, C = split_heads(inner, mixer.head_dim), split_heads(B, mixer.state), split_heads(C, mixer.state)
    A, D = -upcast(weights["A_log"]).exp(), weights["D"]
    y, S = ssd(heads, dt, A, B, C, D, ids, state.get("state"), last, kernel=kernel)
    ctx.keep(conv=tail, state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    y, z = y.flatten(2), projected("z")
    if mixer.norm == "none":
        y = y * elementwise(F.silu, z)
    else:
        gated = silu_then_group_norm if mixer.norm == "gate_first" else group_norm_then_silu
        y = gated(y, z, weights["norm"], eps=eps, groups=B.shape[2])
    return linear(y.to(x.dtype), weights["o_proj"], weights.get("o_bias"))


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier
