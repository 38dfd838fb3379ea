"""Rotary position embedding (arXiv 2104.09864): tables from positions, and their application.

A table is a function of a `Rope`, positions and (for two kinds) a length; nothing is cached, and its values do not
depend on the number of positions. Frequencies and angles are computed in fp64: an fp32 product of position and
frequency is off by half an ulp of the angle, 0.06 rad at position 10^6, the fp64 product by 2e-10. The table itself is
fp32, and its rounding (6e-8 in cos or sin) is the total error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import constants
from fnmodels.ops.dtypes import in_fp64, upcast


@dataclass(frozen=True)
class Rope:
    """The parameters of one rotary table; field names are those of Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope | proportional
    partial: float = 1.0  # fraction of the head's dimensions that are rotated
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def dim(self, head_dim: int) -> int:
        """The number of dimensions of a head that are rotated; some of them by 0 if the kind is proportional."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 m ln(factor) + 1: YaRN's correction of the attention temperature (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """The factor on cos and sin, so that scores are scaled by its square. 1 unless the kind is yarn or longrope."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        ratio = math.log(rope.factor) / math.log(rope.original_max_position_embeddings) if rope.factor > 1 else 0.0
        return math.sqrt(1 + ratio)
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor)


def frequencies(
    rope: Rope, dim: int, length: Tensor | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Frequencies in radians per position, fp64 [dim / 2], or [B, dim / 2] if `length` is [B] (dynamic, longrope).

    length: number of positions of the full sequence, 0-d or [B], for the kinds whose definition needs it. device: by
    default that of the length; frequencies are computed there, because a CUDA graph copies nothing from the host.
    ValueError if the length is missing, and for an unknown kind.
    """
    device = length.device if device is None and length is not None else device
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim
    if rope.kind == "dynamic":
        return _dynamic(rope, dim, exponent, length)
    base = torch.pow(rope.theta, exponent)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, dim, base)
    if rope.kind == "longrope":
        return _longrope(rope, base, length)
    if rope.kind == "proportional":  # the frequencies of the full head, of which only the greatest rotate
        moving = torch.arange(len(base), device=base.device) < int(rope.partial * dim // 2)
        return (base / rope.factor).where(moving, 0)
    if rope.kind != "default":
        raise ValueError(
            f"The rope kind {rope.kind!r} is unknown; known are default, linear, dynamic, llama3, yarn, longrope, "
            "proportional."
        )
    return base


def _dynamic(rope: Rope, dim: int, exponent: Tensor, length: Tensor | None) -> Tensor:
    # NTK-aware: theta grows with the length beyond the trained one, so that the slowest pair just spans it.
    if length is None:
        raise ValueError("The rope kind 'dynamic' needs a length.")
    trained = rope.original_max_position_embeddings
    stretch = rope.factor * length.double().clamp(min=trained) / trained - (rope.factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    return theta[..., None] ** exponent


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    # Long wavelengths are interpolated, short ones kept, those between blended (Llama 3.1 model card and code).
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = original / wavelength
    # Llama 4 Scout has both factors equal, and nothing between
    smooth = ((turns - low) / (high - low)).clamp(0, 1) if low < high else (turns >= low).double()
    return (1 - smooth) * base / rope.factor + smooth * base


def _yarn(rope: Rope, dim: int, base: Tensor) -> Tensor:
    def pair_of(rotations: float) -> float:
        # index of the pair that makes `rotations` full turns over the original context
        original = rope.original_max_position_embeddings
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device=base.device) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _longrope(rope: Rope, base: Tensor, length: Tensor | None) -> Tensor:
    if length is None:
        raise ValueError("The rope kind 'longrope' needs a length.")
    short, long = (constants(f, torch.float64, base.device) for f in (rope.short_factor, rope.long_factor))
    is_long = (length > rope.original_max_position_embeddings)[..., None]
    return base / torch.where(is_long, long, short)


@in_fp64
def query_temperature(positions: Tensor, *, beta: float, period: int) -> Tensor:
    """1 + beta ln(1 + floor(positions / period)), fp32 in the shape of `positions`: a factor on queries.

    It keeps attention sharp beyond the trained length (Llama 4, arXiv 2501.19399). Computed in fp64.
    """
    grown = torch.log1p(torch.floor(positions.double() / period))
    return (1 + beta * grown).float()


def rotary_table(rope: Rope, head_dim: int, positions: Tensor, length: int | Tensor | None = None) -> Tensor:
    """cos and sin of every position: fp32 [B, S, R/2, 2], R the number of rotated dimensions of a head.

    positions: [B, S], any integers. length: as in `frequencies`, an int or [B]; None means the largest position of this
    call + 1, so pass it where a sequence is processed in pieces. ValueError for positions of several axes.
    """
    if positions.ndim != 2:
        raise ValueError(
            f"positions must be [B, S], not {list(positions.shape)}: this model's rope has one axis. Several are "
            "for models whose table is made by `mrope_table`."
        )
    return _table(rope, head_dim, positions[..., None], length)


@in_fp64
def learned_table(rope: Rope, head_dim: int, positions: Tensor, alpha: Tensor) -> Tensor:
    """`rotary_table` with frequencies times exp(alpha), alpha [R/2], in alpha's dtype where that is wider than fp32.

    For kinds of rope without a length.
    """
    freqs = frequencies(rope, rope.dim(head_dim), device=positions.device) * alpha.to(torch.float64).exp()
    angles = positions[..., None] * freqs
    table = torch.stack((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)
    return table.to(torch.promote_types(alpha.dtype, torch.float32))


@in_fp64
def log_positions(positions: Tensor) -> Tensor:
    """ln(1 + positions), fp32 in the shape of `positions`. Computed in fp64."""
    return torch.log1p(positions.double()).float()


@in_fp64
def log_scale(positions: Tensor, *, floor: int, alpha: float) -> Tensor:
    """1 + alpha ln(max((positions + 1) / floor, 1)), fp32 in the shape of `positions`. Computed in fp64."""
    return (1 + alpha * ((positions.double() + 1) / floor).clamp(min=1).log()).float()


def scaled_by_position(q: Tensor, log_position: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """q [B, S, N, H] times scale * ln(1 + position) + shift of each head: log_position [B, S], scale and shift [N].

    It keeps attention sharp over long documents (arXiv 2501.19399, with learned factors).
    """
    factor = upcast(log_position)[..., None] * upcast(scale) + upcast(shift)
    return (q * factor[..., None]).to(q.dtype)


def mrope_table(
    rope: Rope,
    head_dim: int,
    positions: Tensor,
    sections: tuple[int, ...],
    *,
    interleaved: bool = False,
    length: int | Tensor | None = None,
) -> Tensor:
    """`rotary_table` for positions [B, S, A] with A axes; 3 in vision-language models: time, height, width.

    Each pair of dimensions rotates with one axis: sections[a] pairs with axis a, sum(sections) = R / 2. The sections
    are contiguous (Qwen2-VL, arXiv 2409.12191) or interleaved (Qwen3-VL, Qwen3.5): pair j uses axis j mod A until that
    axis has its sections[a] pairs, and axis 0 after that. Text has equal positions on all axes, and so the angles of
    `rotary_table`. ValueError for sections that do not add up to the pairs.
    """
    axes, pairs = len(sections), rope.dim(head_dim) // 2
    if positions.ndim != 3 or positions.shape[-1] != axes:
        raise ValueError(f"positions must be [B, S, {axes}] for the sections {sections}, not {list(positions.shape)}.")
    if interleaved:
        axis_of_pair = [j % axes if j < sections[j % axes] * axes else 0 for j in range(pairs)]
    else:
        axis_of_pair = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if len(axis_of_pair) != pairs or any(axis_of_pair.count(axis) != count for axis, count in enumerate(sections)):
        order = "interleaved" if interleaved else "one after another"
        raise ValueError(f"The sections {sections}, {order}, do not divide the {pairs} pairs that rotate.")
    chosen = positions.index_select(-1, constants(axis_of_pair, torch.int64, positions.device))
    return _table(rope, head_dim, chosen, length)


@in_fp64
def _table(rope: Rope, head_dim: int, positions: Tensor, length: int | Tensor | None) -> Tensor:
    """The table [B, S, R/2, 2] for positions [B, S, 1], or [B, S, R/2] with one position per pair."""
    device, size, rows = positions.device, None, positions.shape[0]
    if not isinstance(length, Tensor) and not torch.compiler.is_compiling() and _is_one_row(positions):
        positions = positions[:1]
    if rope.kind in ("dynamic", "longrope"):
        if length is None:
            length = positions.max() + 1 if positions.numel() else 1  # an empty batch has no maximum
        size = length.to(device) if isinstance(length, Tensor) else torch.full((), length, device=device)
    freqs = frequencies(rope, rope.dim(head_dim), size, device=device)
    if freqs.ndim == 2:  # one length per row
        freqs = freqs[:, None]
    angles, scale = positions * freqs, attention_factor(rope)
    cos, sin = (angles.cos(), angles.sin()) if scale == 1 else (angles.cos() * scale, angles.sin() * scale)
    table = torch.stack((cos, sin), dim=-1).float()
    return table if table.shape[0] == rows else table.expand(rows, -1, -1, -1)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """fp32 [B, S, width]: sines of positions [B, S] over periods from 2 pi to 20000 pi, then the cosines.

    As tensor2tensor computes them (arXiv 1706.03762, section 3.5, has them in turn).
    """
    half = width // 2
    cosines, sines = rotary_table(Rope(1e4 ** (half / (half - 1))), width, positions).unbind(-1)
    return torch.cat((sines, cosines), -1)


def no_rotation(positions: Tensor) -> Tensor:
    """The table [B, S, 0, 2] of a layer without positional encoding (NoPE), which rotates no dimension."""
    return torch.empty((*positions.shape[:2], 0, 2), dtype=torch.float32, device=positions.device)


@tree.pytree
@dataclass(frozen=True)
class Rotation:
    """A table laid out for `apply_rotary`, once for all layers: cos and sin [B|1, S, 1, R] of both halves of R.

    sin is negative in the first half. table: as in `rotary_table`.
    """

    table: Tensor
    cos: Tensor
    sin: Tensor


def is_rotating(table: Any) -> bool:
    """Whether this is the table of a kind whose layers rotate, and can be laid out."""
    return isinstance(table, Tensor) and table.ndim == 4 and bool(table.shape[-2])


def laid_out(table: Tensor) -> Rotation:
    """The `Rotation` of a table [B|1, S, R/2, 2]; that of one row where `rotary_table` made one for all."""
    cos, sin = _cos_sin(table[:1] if _is_one_row(table) else table)
    return Rotation(table, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def _is_one_row(tensor: Tensor) -> bool:
    """Whether all rows [B, ...] are one in memory, as `prepare` makes them where positions are not given."""
    return tensor.shape[0] > 1 and tensor.stride(0) == 0


def table_of(table: Tensor | Rotation) -> Tensor:
    """The table [B|1, S, R/2, 2], laid out or not."""
    return table.table if isinstance(table, Rotation) else table


def _cos_sin(table: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = table.unsqueeze(-3).unbind(-1)  # one table for all heads
    return cos, sin


def apply_rotary(x: Tensor, table: Tensor | Rotation) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of every head: Hugging Face's half-split layout.

    x [B, S, N, H]; table [B|1, S, R/2, 2], R = 0 for a layer without position. Computed in fp32 at least and cast back
    to x's dtype.
    """
    if isinstance(table, Rotation):
        half = table.table.shape[-2]
    elif (half := table.shape[-2]) == 0:
        return x
    elif not torch.compiler.is_compiling():
        table = laid_out(table)
    # is_grads_batched has no slice of everything
    read = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    if isinstance(table, Rotation):
        # Both halves at once, with contiguous tables: 0.4 of the time of four products of slices on a CPU.
        turned = torch.addcmul(read * table.cos, read.roll(half, -1), table.sin)
    else:
        turned = _turned_in_graph(read, table)
    turned = turned if turned.dtype is x.dtype else turned.to(x.dtype)
    return turned if read is x else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def _turned_in_graph(x: Tensor, table: Tensor) -> Tensor:
    """x [..., R] rotated; Inductor fuses this with its reader, but stores concatenations: two per layer of a step."""
    cos, sin = _cos_sin(table)
    signs = torch.arange(-1, 2, 2, dtype=sin.dtype, device=sin.device)[:, None]
    halves = x.unflatten(-1, (2, table.shape[-2]))
    return torch.addcmul(halves * cos.unsqueeze(-2), halves.flip(-2), sin.unsqueeze(-2) * signs).flatten(-2)


def apply_rotary_interleaved(x: Tensor, table: Tensor | Rotation) -> Tensor:
    """`apply_rotary` for the pairs (2i, 2i + 1): the interleaved layout of the original paper."""
    table = table_of(table)
    half = table.shape[-2]
    if half == 0:
        return x
    cos, sin = _cos_sin(table)
    even, odd = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def apply_rotary_last(
    x: Tensor,
    table: Tensor | Rotation,
    rotate: Callable[[Tensor, Tensor | Rotation], Tensor] = apply_rotary,
) -> Tensor:
    """`rotate`, which is `apply_rotary` or `apply_rotary_interleaved`, of the last R dimensions of every head."""
    width = 2 * table_of(table).shape[-2]
    still, turned = x.split((x.shape[-1] - width, width), -1)
    return torch.cat((still, rotate(turned, table)), -1)
