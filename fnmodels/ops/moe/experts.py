"""Experts: gated MLPs of which each token passes through k, all stacked in one tree.

    experts(weights tree, x [T, D], weights [T, k], indices [T, k], valid [T], *, act, input_weighted) -> [T, D]

The tree holds gate_proj and up_proj [E, F, D], down_proj [E, D, F] and optionally gate_bias, up_bias [E, F] and
down_bias [E, D]. `act` (gate, up) -> inner. input_weighted: the weight multiplies what goes into the expert, in place
of what comes out (Llama 4). Padding reaches no expert and gets 0.

    path       what it does                              what it is for
    grouped    sorts, and F.grouped_mm                   rows of 16 n bytes, not fp64; first derivatives only
    loop       sorts, and one product per expert         any width and dtype; reads the counts; first derivatives only
    dense      every expert on every token, others 0     static shapes: every transform, compilation and export
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.ops.autograd_guard import first_order
from fnmodels.options import Experts, Kernel

from .dispatch import Dispatched, combine, dispatch
from .dispatch_cpu import Packed, pack, unpack
from .experts_loop import Act, loop_mlps

_ROWS = 16


def choose_experts(experts: str | Experts, x: Tensor, *weights: Tensor, kernel: Kernel) -> Experts:
    """The function behind `experts`: "loop", "grouped", "dense", "auto", or a function of that signature itself.

    "auto" is "dense" with kernel="math", in compiled graphs, and where x or the experts' weights hold no values to read
    (vmap, meta); else "grouped" where dtype and widths allow it, and "loop" where they do not.
    """
    if not isinstance(experts, str):
        return experts
    if experts == "auto":
        if kernel == "math" or torch.compiler.is_compiling() or not all(map(readable, (x, *weights))):
            experts = "dense"
        else:
            experts = "loop" if x.dtype is torch.float64 or any(map(_ragged, weights)) else "grouped"
    if experts not in _PATHS:
        raise ValueError(f"experts is {experts!r}; it must be auto, {', '.join(_PATHS)}, or a function.")
    return _PATHS[experts]


def loop_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """Products of each expert that has tokens, whatever their widths and dtype."""
    if torch.compiler.is_compiling() or not readable(x) or not readable(indices):
        raise NotImplementedError(
            'experts="loop" reads on the host how many tokens each expert has, which vmap and compiled graphs do not '
            'allow: experts="dense" has static shapes (and is what kernel="math" takes).'
        )
    names = list(experts)
    x, weights, *leaves = first_order("loop", x, weights, *experts.values(), vmap=False)
    experts = dict(zip(names, leaves, strict=True))
    rows, packed, weights = packed_rows(x, weights, indices, valid, len(experts["gate_proj"]), input_weighted)
    out = loop_mlps(experts, rows, packed.counts.tolist(), act)
    return unpack(out, packed, weights)


def grouped_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """F.grouped_mm over the sorted rows: three calls whatever E is, and on CUDA nothing is read on the host."""
    if x.dtype is torch.float64:
        raise ValueError(f'experts="grouped" takes fp32 and half precision, not {x.dtype}: experts="loop" takes it.')
    if torch.compiler.is_compiling() and x.dtype is not torch.bfloat16:
        raise NotImplementedError(
            'experts="grouped" is compiled in bf16 only: torch traces F.grouped_mm in no other dtype, and these tokens '
            f'are {x.dtype}. experts="dense" compiles in all, at E / k times the work.'
        )
    for name in ("gate_proj", "up_proj", "down_proj"):
        if _ragged(leaf := experts[name]):
            raise ValueError(
                'experts="grouped" needs rows that are a multiple of 16 bytes long and apart, but those of '
                f"{name} hold {leaf.shape[-1]} numbers of {leaf.element_size()} bytes, with strides "
                f'{tuple(leaf.stride())}: experts="loop" takes any width.'
            )
    names = list(experts)
    x, weights, *leaves = first_order("grouped", x, weights, *experts.values(), vmap=False)
    experts = dict(zip(names, leaves, strict=True))
    count = len(experts["gate_proj"])
    if not (x.is_cuda or torch.compiler.is_compiling()) and readable(indices) and readable(valid):
        rows, packed, weights = packed_rows(x, weights, indices, valid, count, input_weighted)
        return unpack(_grouped_mlps(experts, rows, packed.counts, act), packed, weights)
    rows, sent, weights = sorted_rows(x, weights, indices, valid, count, input_weighted)
    owned = torch.arange(len(rows), device=rows.device) < sent.counts.sum()

    def cleared(rows: Tensor) -> Tensor:
        """Rows past the last offset come back as uninitialized memory; set to 0 they have no gradient either."""
        return rows.where(owned[:, None], 0)

    return combine(_grouped_mlps(experts, cleared(rows), sent.counts, act, cleared), sent, weights)


def _grouped_mlps(
    experts: Mapping[str, Tensor],
    rows: Tensor,
    counts: Tensor,
    act: Act,
    cleared: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    offsets = counts.cumsum(0).to(torch.int32)
    expert = None
    if any(name.endswith("bias") for name in experts):
        ids = torch.arange(len(counts), device=rows.device)
        padded = torch.cat((ids, ids.new_zeros(1)))
        sizes = torch.cat((counts, (len(rows) - counts.sum())[None]))
        expert = padded.repeat_interleave(sizes, output_size=len(rows))

    def linear(rows: Tensor, name: str) -> Tensor:
        out = F.grouped_mm(rows, experts[f"{name}_proj"].mT, offs=offsets)
        bias = experts.get(f"{name}_bias")
        if bias is None or expert is None:
            return out
        return cleared(out) + bias.index_select(0, expert)

    return linear(cleared(act(linear(rows, "gate"), linear(rows, "up"))), "down")


def dense_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """Every expert on every token, at E / k times the work, in plain operations of static shape.

    Where an expert was not chosen it is given zeros, not the token: what it would make of that token may not even be
    finite, and 0 times that would be NaN.
    """
    ids = torch.arange(experts["gate_proj"].shape[0], device=x.device)
    picked = (indices[..., None] == ids) & valid[:, None, None]
    share = torch.where(picked, weights[..., None], 0).sum(1).T[..., None]  # [E, T, 1]
    chosen = picked.any(1).T[..., None]
    given = torch.where(chosen, x, 0)
    if input_weighted:
        given, share = given * share.to(x.dtype), chosen
    inner = act(_batched(experts, given, "gate"), _batched(experts, given, "up"))
    return (_batched(experts, inner, "down") * share).sum(0).to(x.dtype)


_PATHS: dict[str, Experts] = {"loop": loop_experts, "grouped": grouped_experts, "dense": dense_experts}


def sorted_rows(
    x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool
) -> tuple[Tensor, Dispatched, Tensor]:
    """(what `experts` experts are given, sorted; where it came from; the weights [T, k] of what comes out)."""
    if input_weighted:  # the product's gradients are NaN where either factor is, with a slope of 0 too
        x, weights = x.where(valid[:, None], 0), weights.where(valid[:, None], 0)
    rows, sent = dispatch(x, indices, valid, experts)
    if input_weighted and len(rows):
        rows = rows * weights.flatten().index_select(0, sent.order)[:, None].to(rows.dtype)
        weights = torch.ones_like(weights)
    return rows, sent, weights


def packed_rows(
    x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool
) -> tuple[Tensor, Packed, Tensor]:
    """As `sorted_rows`, where counts may be read on the host.

    Products in half precision are of multiples of 16 rows. For every shape that it has not met lately oneDNN writes
    code, which takes 0.6 ms where an expert's product takes 0.05, and each expert has another number of tokens in each
    step: a bf16 training step of benchmarks/moe.py takes 1.0 s of processor time so, and 1.9 s without. Experts that
    have fewer rows than that on average, as in decoding, have few shapes, and do not get more rows.
    """
    many = x.dtype.itemsize == 2 and indices.numel() >= _ROWS * experts
    rows, packed = pack(x, indices, valid, experts, multiple=_ROWS if many else 1)
    if input_weighted:
        rows = rows * weights.flatten().index_select(0, packed.choice)[:, None].to(rows.dtype)
        weights = torch.ones_like(weights)
    return rows, packed, weights


def _batched(experts: Mapping[str, Tensor], x: Tensor, name: str) -> Tensor:
    out, bias = x @ experts[f"{name}_proj"].mT, experts.get(f"{name}_bias")
    return out if bias is None else out + bias[:, None]


def _ragged(weight: Tensor) -> bool:
    """Whether F.grouped_mm does not take its rows, or steps from row to row. (Biases are not given to it.)"""
    if weight.ndim != 3:
        return False
    inner, outer = sorted(weight.stride()[-2:])
    return inner != 1 or any(n * weight.element_size() % 16 for n in (weight.shape[-1], outer))
