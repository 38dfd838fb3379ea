"""`explain_invariance`: measures on this machine what kernel="invariant" relies on."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal
from fnmodels.ops.attention.select import attention
from fnmodels.ops.invariant.rows import elementwise, invariant_linear, invariant_rows, softmax
from fnmodels.ops.norm import rms_norm

_WIDTHS = ((32, 12), (24, 40), (64, 200), (256, 768), (1536, 512))  # of products: in, out
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 31, 64, 129)  # of rows
_HEADS = ((24, 6, 2), (80, 4, 4), (128, 4, 4), (256, 8, 4))  # their width, those of queries, those of keys
_TOKENS = 200


def explain_invariance() -> dict[str, bool]:
    """Tries whether the bits of a token are independent of its batch on this machine, as kernel="invariant" promises.

    It takes some seconds, on the CPU. Cases are the number of rows of a product (fp32 and bf16), an element's place
    under an activation, and the number of rows of a norm and of log-softmax. So are the form in which attention gets
    its keys, and the number of threads, for gradients of weights, attention and a router too. Where a case is False,
    kernel="invariant" is not batch-invariant on this machine, and its results are right up to rounding.

    Returns:
        {what a token's bits must not depend on: whether that held in all cases tried}.
    """
    draw = torch.Generator().manual_seed(0)
    invariant: dict[str, bool] = {}
    with torch.no_grad(), invariant_rows(True):
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            pairs = [(_drawn(draw, 300, n, dtype), _drawn(draw, m, n, dtype)) for n, m in _WIDTHS]
            invariant[f"rows of {name} products"] = all(
                _by_row(functools.partial(invariant_linear, weight=w, bias=None), x) for x, w in pairs
            )
            invariant[f"form of the keys of {name} attention"] = all(
                _attention_alike(draw, dtype, *heads) for heads in _HEADS
            )
        x = _drawn(draw, 300, 72, torch.float32)
        functions = (F.silu, F.gelu, torch.sigmoid, F.softplus, torch.tanh, torch.exp)
        invariant["place of an element"] = all(
            _by_row(functools.partial(elementwise, function), x) for function in functions
        )
        norms = (functools.partial(rms_norm, weight=None, eps=1e-6), functools.partial(F.log_softmax, dim=-1))
        invariant["rows of norms and log-softmax"] = all(_by_row(function, x) for function in norms)
        invariant["number of threads"] = _threads_alike(draw)
    return invariant


def _drawn(draw: torch.Generator, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, generator=draw).to(dtype)


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether every row of x has the bits that it has among all, in runs of so many rows."""
    whole = function(x)
    return all(torch.equal(torch.cat([function(part.clone()) for part in x.split(n)]), whole) for n in _COUNTS)


def _attention_alike(draw: torch.Generator, dtype: torch.dtype, width: int, count: int, groups: int) -> bool:
    """A document in a row of its own, behind another one, and its last tokens alone on the keys of all."""
    q, k, v = (
        _drawn(draw, _TOKENS, heads * width, dtype).view(1, _TOKENS, heads, width) for heads in (count, groups, groups)
    )
    other = [_drawn(draw, 37, t.shape[2] * width, dtype).view(1, 37, -1, width) for t in (q, k, v)]
    positions, ids = torch.arange(_TOKENS)[None], torch.ones(1, _TOKENS, dtype=torch.long)
    run = functools.partial(attention, kernel="invariant", scale=0.2)
    mask = Mask(positions, ids, positions, ids, None, None, Causal())
    whole = run(q, k, v, mask)
    places, documents = _joined(positions[:, :37], positions), _joined(ids[:, :37], ids + 1)
    packed = Mask(places, documents, places, documents, None, None, Causal())
    both_q, both_k, both_v = map(_joined, other, (q, k, v))
    behind = run(both_q, both_k, both_v, packed)[:, 37:]
    last = [run(q[:, lo:], k, v, mask.select(slice(lo, None), slice(None))) for lo in (_TOKENS - 1, _TOKENS - 6)]
    return torch.equal(whole, behind) and all(torch.equal(whole[:, -t.shape[1] :], t) for t in last)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), 1)


def _threads_alike(draw: torch.Generator) -> bool:
    pairs = [
        (_drawn(draw, 513, 512, dtype), _drawn(draw, 1536, 512, dtype)) for dtype in (torch.float32, torch.bfloat16)
    ]
    few, logits = _drawn(draw, 27, 1184, torch.float32), _drawn(draw, 200, 60, torch.float32)
    queries, keys = _drawn(draw, _TOKENS, 1024, torch.float32), _drawn(draw, _TOKENS, 64, torch.float32)
    many = _drawn(draw, 4096, 128, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in {1, before, 2, 3}:
            torch.set_num_threads(threads)
            products = [elementwise(F.silu, invariant_linear(x, weight, None)) for x, weight in pairs]
            gradients = _softmax_gradient(logits), *_attention_gradients(queries, keys), _weight_gradient(many)
            results.append([*products, elementwise(functools.partial(F.gelu, approximate="tanh"), few), *gradients])
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(result, first) for other in results for result, first in zip(other, results[0], strict=True))


@torch.enable_grad()
def _weight_gradient(x: Tensor) -> Tensor:
    weight = x[: x.shape[1]].clone().requires_grad_()
    (grad,) = torch.autograd.grad(invariant_linear(x, weight, None), weight, x)
    return grad


@torch.enable_grad()
def _softmax_gradient(logits: Tensor) -> Tensor:
    scores = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(softmax(scores), scores, logits)
    return grad


@torch.enable_grad()
def _attention_gradients(queries: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, where many queries share a key."""
    positions, ids = torch.arange(_TOKENS)[None], torch.ones(1, _TOKENS, dtype=torch.long)
    q, k, v = (t.view(1, _TOKENS, -1, 64).clone().requires_grad_() for t in (queries, keys, keys))
    mask = Mask(positions, ids, positions, ids, None, None, Causal())
    out = attention(q, k, v, mask, kernel="invariant", scale=0.2)
    return torch.autograd.grad(out, (q, k, v), queries.view(out.shape))
