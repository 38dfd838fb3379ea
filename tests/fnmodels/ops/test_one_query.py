"""Attention of one query in compiled code equals attention written out, by Inductor's own loops."""

import pytest
import torch
from torch import Tensor

from fnmodels.ops.attention import sdpa
from fnmodels.ops.attention.math import math_attention
from fnmodels.ops.cpu import one_query

ROWS, HEADS, GROUPS, WIDTH = 3, 4, 2, 8
MASKS = {"none": None, "per row": (ROWS, 1), "for all rows": (1, 1), "per head": (ROWS, HEADS)}


def drawn(dtype: torch.dtype, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, 3, HEADS, WIDTH), (ROWS, keys, GROUPS, WIDTH), (ROWS, keys, GROUPS, WIDTH - 2)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def mask_of(name: str, keys: int) -> Tensor | None:
    """Half of the keys at random; where rows have masks of their own, the first row's first head sees none."""
    shape = MASKS[name]
    if shape is None:
        return None
    allowed = torch.rand(*shape, 1, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    if shape[0] > 1:
        allowed[0, 0] = False
    return allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mask", "keys"), [*((mask, 20) for mask in MASKS), ("none", 64), ("per row", 64), ("none", 150), ("per head", 150)]
)
def test_it_equals_attention_written_out(
    mask: str, keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is computed in the graph, and is the middle one of three, so that it lies within a tensor.

    Values are summed in blocks of 64 keys: none, one, and two with a rest.
    """
    torch.compiler.reset()
    q, k, v = drawn(dtype, keys)
    allowed, calls = mask_of(mask, keys), []
    own = one_query.one_query_attention
    monkeypatch.setattr(sdpa, "one_query_attention", lambda *given, **more: (calls.append(1), own(*given, **more))[1])

    def step(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        return sdpa.sdpa_attention((2 * q.tanh())[:, 1:2], k, v, allowed, scale=0.3)

    with torch.no_grad():
        found = torch.compile(step, fullgraph=True)(q, k, v, allowed)
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool) if allowed is None else allowed
        exact = math_attention((2 * q.tanh())[:, 1:2].double(), k.double(), v.double(), seen, scale=0.3)
    assert calls
    rounding = 1e-6 if dtype is torch.float32 else 2e-2
    assert (found.double() - exact).abs().max() < rounding * exact.abs().max()


@pytest.mark.parametrize("change", ["eager", "gradients", "fp64", "two queries"])
def test_other_calls_take_the_fused_kernel(change: str) -> None:
    q = torch.zeros(1, 2 if change == "two queries" else 1, HEADS, WIDTH)
    q = q.double() if change == "fp64" else q

    def ask(q: Tensor) -> Tensor:
        return q + int(one_query.is_one_query(q))

    with torch.set_grad_enabled(change == "gradients"):
        run = ask if change == "eager" else torch.compile(ask, backend="eager", fullgraph=True)
        assert run(q).max() == 0
