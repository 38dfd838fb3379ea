"""MoE experts: E stacked MLPs, each applied to its tokens, by one of several implementations.

    experts(weights tree, x [T, D], weights [T, k], indices [T, k], valid [T], *, act, input_weighted) -> [T, D]

The tree holds gate_proj and up_proj [E, F, D], down_proj [E, D, F] and optionally gate_bias, up_bias [E, F] and
down_bias [E, D]. `act` (gate, up) -> inner; experts without a gate have no gate_proj, and `act` up -> inner.
input_weighted: the weight multiplies the expert's input instead of its output (Llama 4). Padding reaches no expert, and
its output is 0.

    path       implementation                            supports
    grouped    sorted tokens, F.grouped_mm               rows of 16 n bytes, not fp64; first derivatives only
    loop       sorted tokens, a product per expert       any width and dtype; reads counts; first derivatives only
    dense      every expert on every token, others 0     static shapes: every transform, compilation and export
    invariant  as loop, by `invariant_linear`            bits of a token that depend on it alone; first derivatives only

Leaves that are kept as a file stores them have `stored_experts`, or `dense_stored_experts` where shapes are static.
"auto" has two more for few tokens without gradients on a CPU: `few_experts` in eager mode, and `gathered_experts` in
compiled code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.ops.autograd_guard import first_order
from fnmodels.ops.cpu.dispatch import DispatchedCpu, combine_cpu, dispatch_cpu
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import invariant_linear
from fnmodels.ops.linear import linear
from fnmodels.ops.torch_compilation import guarded_true
from fnmodels.ops.torch_internals import SECOND_LEVEL_CACHE, in_graph

from .dispatch import Dispatched, combine, dispatch
from .experts_loop import Act, inputs_of, loop_mlps

_ROWS = 16


def is_stored(weight: Any) -> bool:
    """Whether a leaf of experts is kept as a file stores it (`params.quantized.kept`), itself or below an adapter."""
    return hasattr(weight, "dequantized") or hasattr(getattr(weight, "weight", None), "dequantized")


def with_merged_adapters(experts: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of experts, those with an adapter (`params.lora`) merged, for no product but `stored_experts` has one.

    Stored leaves keep their adapters.
    """
    return {name: w.merged() if hasattr(w, "merged") and not is_stored(w) else w for name, w in experts.items()}


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
    """Experts one after another, for any width and dtype. NotImplementedError under vmap and in compiled graphs."""
    if torch.compiler.is_compiling() or not readable(x) or not readable(indices):
        raise NotImplementedError(
            'experts="loop" reads on the host how many tokens each expert has, which vmap and compiled graphs do not '
            'allow: experts="dense" has static shapes (and is what kernel="math" takes).'
        )
    names = list(experts)
    x, weights, *leaves = first_order("loop", x, weights, *experts.values(), vmap=False)
    experts = dict(zip(names, leaves, strict=True))
    rows, dispatched, weights = sorted_rows_cpu(x, weights, indices, valid, len(experts["down_proj"]), input_weighted)
    out = loop_mlps(experts, rows, dispatched.counts.tolist(), act)
    return combine_cpu(out, dispatched, weights)


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
    """Experts by F.grouped_mm over the sorted rows: three calls for any E; on CUDA nothing is read on the host."""
    if x.dtype is torch.float64:
        raise ValueError(f'experts="grouped" takes fp32 and half precision, not {x.dtype}: experts="loop" takes it.')
    if torch.compiler.is_compiling() and x.dtype is not torch.bfloat16:
        raise NotImplementedError(
            'experts="grouped" is compiled in bf16 only: torch traces F.grouped_mm in no other dtype, and these tokens '
            f'are {x.dtype}. experts="dense" compiles in all, at E / k times the work.'
        )
    for name, leaf in experts.items():
        if misaligned(leaf):
            raise ValueError(
                'experts="grouped" needs rows that are a multiple of 16 bytes long and apart, but those of '
                f"{name} hold {leaf.shape[-1]} elements of {leaf.element_size()} bytes, with strides "
                f'{tuple(leaf.stride())}: experts="loop" takes any width.'
            )
    names = list(experts)
    x, weights, *leaves = first_order("grouped", x, weights, *experts.values(), vmap=False)
    experts = dict(zip(names, leaves, strict=True))
    count = len(experts["down_proj"])
    if not (x.is_cuda or torch.compiler.is_compiling()) and readable(indices) and readable(valid):
        rows, origin, weights = sorted_rows_cpu(x, weights, indices, valid, count, input_weighted)
        return combine_cpu(_grouped_mlps(experts, rows, origin.counts, act), origin, weights)
    rows, dispatched, weights = sorted_rows(x, weights, indices, valid, count, input_weighted)
    owned = torch.arange(len(rows), device=rows.device) < dispatched.counts.sum()

    def cleared(rows: Tensor) -> Tensor:
        """Zero the rows past the last offset, which F.grouped_mm leaves uninitialized; they get no gradient either."""
        return rows.where(owned[:, None], 0)

    return combine(_grouped_mlps(experts, cleared(rows), dispatched.counts, act, cleared), dispatched, weights)


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

    return linear(cleared(act(*(linear(rows, name) for name in inputs_of(experts)))), "down")


def few_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """The chosen experts alone, one after another, without gradients.

    F.grouped_mm loops over all experts on a CPU, which is a third of a decoding step's time for one token.
    """
    k = indices.shape[1]
    entries = [entry for entry, real in enumerate(valid.repeat_interleave(k).tolist()) if real]
    chosen = indices.flatten().tolist()
    entries.sort(key=chosen.__getitem__)  # by expert, then by token
    if not entries:
        return torch.zeros_like(x)
    order = torch.tensor(entries)
    rows, share = x.index_select(0, order // k), weights.flatten()[order, None]
    spans = [(expert, len(list(group))) for expert, group in itertools.groupby(entries, key=chosen.__getitem__)]
    if input_weighted:
        rows, share = rows * share.to(rows.dtype), torch.ones_like(share)

    def linear(rows: Tensor, name: str) -> Tensor:
        weight, bias = experts[f"{name}_proj"], experts.get(f"{name}_bias")
        parts = zip(spans, rows.split([size for _, size in spans]), strict=True)
        return torch.cat([F.linear(part, weight[e], None if bias is None else bias[e]) for (e, _), part in parts])

    out = linear(act(*(linear(rows, name) for name in inputs_of(experts))), "down")
    y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return y.index_add_(0, order // k, out * share.to(y.dtype)).to(x.dtype)


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

    An expert that a token did not choose gets zeros, not the token: its output might not be finite, and 0 times that
    would be NaN.
    """
    ids = torch.arange(experts["down_proj"].shape[0], device=x.device)
    picked = (indices[..., None] == ids) & valid[:, None, None]
    share = torch.where(picked, weights[..., None], 0).sum(1).T[..., None]  # [E, T, 1]
    chosen = picked.any(1).T[..., None]
    rows = torch.where(chosen, x, 0)
    if input_weighted:
        rows, share = rows * share.to(x.dtype), chosen
    inner = act(*(_batched(experts, rows, name) for name in inputs_of(experts)))
    return (_batched(experts, inner, "down") * share).sum(0).to(x.dtype)


def compiled_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """`gathered_experts` for few tokens on a CPU without gradients, as in decoding, and `dense_experts` otherwise."""
    few = (
        not torch.is_grad_enabled()
        and in_graph(x, weights, *experts.values())
        and guarded_true(indices.numel() <= _most_gathered(experts["down_proj"]))
    )
    chosen = gathered_experts if few else dense_experts
    return chosen(experts, x, weights, indices, valid, act=act, input_weighted=input_weighted)


def _most_gathered(weight: Tensor) -> int:
    """The entries [T, k] up to which gathered weights were read faster than all weights [E, out, in].

    Measured on one core with AVX-512 and AMX. An expert that stays in the second-level cache is read from there by the
    entries after its first one. Milliseconds, gathered and dense: fp32, 8 of 128 experts of 256 x 96, 1 token 0.3 and
    3.1, 64 tokens 4.9 and 19; 2 of 8 experts of 1,024 x 3,584, 8 tokens 46 and 70, 16 tokens 79 and 74; the last ones
    in bf16, 4 tokens 14 and 21, 8 tokens 30 and 24.
    """
    size = weight[0].numel() * weight.dtype.itemsize
    return len(weight) * (4 if size <= SECOND_LEVEL_CACHE // 2 else max(1, weight.dtype.itemsize // 2))


def gathered_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """The chosen experts' weights [T k, out, in] times the tokens, in plain operations of static shape. No gradients.

    Inductor fuses the gather, the product and the sum into one loop without a copy of the weights. Rows are sorted by
    expert, so that consecutive rows of an expert find its weights in the cache.
    """
    count = len(experts["down_proj"])
    rows, dispatched, weights = sorted_rows(x, weights, indices, valid, count, input_weighted)
    # Each row's expert, and any expert at padding. The values of a sort are a buffer, where Inductor would recompute
    # `indices` by `dispatched.order` for every element of a weight: 1.2 times the time, 2.4 times with symbolic sizes.
    expert = indices.where(valid[:, None], count).flatten().sort(stable=True).values.clamp(max=count - 1)

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = experts.get(f"{name}_bias")
        out = (upcast(experts[f"{name}_proj"][expert]) * upcast(rows)[:, None]).sum(-1)
        return (out if bias is None else out + bias[expert]).to(rows.dtype)

    return combine(linear(act(*(linear(rows, name) for name in inputs_of(experts))), "down"), dispatched, weights)


def invariant_experts(
    experts: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """Experts one after another; a token's bits do not depend on how many tokens its experts have."""
    if torch.compiler.is_compiling() or not readable(x) or not readable(indices):
        raise NotImplementedError(
            'experts="invariant" reads on the host how many tokens each expert has, which vmap and compiled graphs do '
            'not allow: experts="dense" has static shapes.'
        )
    rows, dispatched, weights = sorted_rows_cpu(
        x, weights, indices, valid, experts["down_proj"].shape[0], input_weighted
    )
    return combine_cpu(
        _one_by_one(experts, rows, dispatched.counts.tolist(), act, invariant_linear), dispatched, weights
    )


def stored_experts(
    experts: Mapping[str, Any],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """Experts one after another, with leaves kept as a file stores them: only an expert with tokens is dequantized."""
    rows, dispatched, weights = sorted_rows_cpu(
        x, weights, indices, valid, experts["down_proj"].shape[0], input_weighted
    )
    return combine_cpu(_one_by_one(experts, rows, dispatched.counts.tolist(), act, linear), dispatched, weights)


def dense_stored_experts(
    experts: Mapping[str, Any],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Act,
    input_weighted: bool = False,
) -> Tensor:
    """`dense_experts` of all experts' dequantized weights."""
    plain = {name: leaf.merged() if hasattr(leaf, "merged") else leaf for name, leaf in experts.items()}
    plain = {name: leaf.dequantized() if is_stored(leaf) else leaf for name, leaf in plain.items()}
    return dense_experts(plain, x, weights, indices, valid, act=act, input_weighted=input_weighted)


def _one_by_one(
    experts: Mapping[str, Any], rows: Tensor, counts: list[int], act: Act, product: Callable[..., Tensor]
) -> Tensor:
    # unbind: the gradient of each expert's part alone would be a tensor of all experts' size.
    each = {name: leaf.unbind() for name, leaf in experts.items()}
    out = [
        _mlp({name: leaves[expert] for name, leaves in each.items()}, part, act, product) if len(part) else part
        for expert, part in enumerate(rows.split(counts))
    ]
    return torch.cat(out)


def _mlp(expert: Mapping[str, Any], x: Tensor, act: Act, product: Callable[..., Tensor]) -> Tensor:
    read = (product(x, expert[f"{name}_proj"], expert.get(f"{name}_bias")) for name in inputs_of(expert))
    return product(act(*read), expert["down_proj"], expert.get("down_bias"))


def sorted_rows(
    x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool
) -> tuple[Tensor, Dispatched, Tensor]:
    """(rows sorted by expert, the `Dispatched` that `combine` needs, the weights [T, k] of the experts' outputs)."""
    if input_weighted:  # the product's gradients are NaN where either factor is, even for a zero grad_output
        x, weights = x.where(valid[:, None], 0), weights.where(valid[:, None], 0)
    rows, dispatched = dispatch(x, indices, valid, experts)
    if input_weighted and len(rows):
        rows = rows * weights.flatten().index_select(0, dispatched.order)[:, None].to(rows.dtype)
        weights = torch.ones_like(weights)
    return rows, dispatched, weights


def sorted_rows_cpu(
    x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool
) -> tuple[Tensor, DispatchedCpu, Tensor]:
    """`sorted_rows` where counts may be read on the host.

    In half precision, rows are padded to multiples of 16. oneDNN generates code for every shape not seen recently,
    which takes 0.6 ms where an expert's product takes 0.05, and each expert's number of tokens changes in every step: a
    bf16 training step of benchmarks/moe.py takes 1.0 s of processor time with padding and 1.9 s without. Experts with
    fewer rows than that on average, as in decoding, have few shapes and are not padded.
    """
    many = x.dtype.itemsize == 2 and indices.numel() >= _ROWS * experts
    rows, dispatched = dispatch_cpu(x, indices, valid, experts, multiple=_ROWS if many else 1)
    if input_weighted:
        rows = rows * weights.flatten().index_select(0, dispatched.choice)[:, None].to(rows.dtype)
        weights = torch.ones_like(weights)
    return rows, dispatched, weights


def _batched(experts: Mapping[str, Tensor], x: Tensor, name: str) -> Tensor:
    out, bias = x @ experts[f"{name}_proj"].mT, experts.get(f"{name}_bias")
    return out if bias is None else out + bias[:, None]


def misaligned(weight: Tensor) -> bool:
    """Whether F.grouped_mm rejects a weight [E, out, in]: rows or strides that are no multiple of 16 bytes."""
    if weight.ndim != 3:
        return False
    inner, outer = sorted(weight.stride()[-2:])
    return inner != 1 or any(n * weight.element_size() % 16 for n in (weight.shape[-1], outer))
